"""Does FM²'s scheme converge as its theorem says? An independent check in NumPy; nothing of the package takes part.

The theorem bounds the mean squared gradient of FM² by terms in 1/sqrt(T), a noise floor sigma^2/Z, and terms in 1/T.
Here a federation of Z clients with a smooth non-convex loss runs the same scheme: shared parameters (v, m_d), averaged
every round; local ones (m_c), never averaged; K local SGD steps a round; and the penalty `lambda ||m_d - m_d_hat||^2`
towards the m_d that came down. What is measured is the rate on this problem, which proves nothing about the theorem.

    L_i(w) = mean_n log(1 + exp(-y_n x_n . w)) + 0.05 sum_j w_j^2 / (1 + w_j^2),    w = (v, m_d, m_c)
    G_t = ||mean_i grad_(v, m_d) L_i||^2 + mean_i ||grad_m_c L_i||^2    at the start of round t, over all samples
    drift_t = mean_i ||m_d^i - m_d_hat||^2                              at its end, before averaging

Clients have equal sizes, so their weights p_i are 1/Z. Client means of the inputs, and the weights that labels come
from, differ between clients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

Array = NDArray[np.float64]

SAMPLES, BATCH, STEPS, CLIENTS, SEEDS = 80, 4, 4, 6, 3
PART = 3  # parameters in each of v, m_d and m_c
V, MD, MC = slice(0, PART), slice(PART, 2 * PART), slice(2 * PART, 3 * PART)
SHARED = slice(0, 2 * PART)
ROUNDS = (16, 64, 256)
LAMBDAS = (0.0, 0.1, 1.0, -1.0)
CLIENT_SHIFT = 0.5  # deviation of a client's mean input, and of its labelling weights, from the common ones
NON_CONVEX = 0.05


@dataclass(frozen=True)
class Trace:
    """What rounds left behind, `(T, lambdas, seeds)` each: the two parts of G, and the drift."""

    shared: Array
    local: Array
    drift: Array

    @property
    def gradient(self) -> Array:
        """G."""
        return self.shared + self.local


def problem(clients: int = CLIENTS, seeds: int = SEEDS) -> tuple[Array, Array]:
    """Inputs `(seeds, Z, n, 3 PART)` and labels -1 or 1 `(seeds, Z, n)`."""
    inputs, labels = [], []
    for seed in range(seeds):
        rng = np.random.default_rng([clients, seed])
        mean = CLIENT_SHIFT * rng.normal(size=(clients, 1, 3 * PART))
        x = mean + rng.normal(size=(clients, SAMPLES, 3 * PART))
        teacher = rng.normal(size=3 * PART) + CLIENT_SHIFT * rng.normal(size=(clients, 3 * PART))
        chance = 1 / (1 + np.exp(-np.einsum("znd,zd->zn", x, teacher)))
        inputs.append(x)
        labels.append(np.where(rng.random(chance.shape) < chance, 1.0, -1.0))
    return np.stack(inputs), np.stack(labels)


def loss(w: Array, x: Array, y: Array) -> Array:
    """L of each client `(..., Z)`."""
    margin = y * np.einsum("...nd,...d->...n", x, w)
    return np.log1p(np.exp(-margin)).mean(-1) + NON_CONVEX * (w**2 / (1 + w**2)).sum(-1)


def gradient(w: Array, x: Array, y: Array) -> Array:
    """dL/dw of each client `(..., Z, 3 PART)`."""
    margin = y * np.einsum("...nd,...d->...n", x, w)
    pull = -y / (1 + np.exp(margin))
    return np.einsum("...nd,...n->...d", x, pull) / x.shape[-2] + 2 * NON_CONVEX * w / (1 + w**2) ** 2


def train(
    data: tuple[Array, Array], rounds: int, eta: float, lambdas: tuple[float, ...], batch: int | None = BATCH
) -> Trace:
    """Run the scheme for each lambda and seed at once, all lambdas on the same batches; `batch` None: no noise."""
    x, y = data
    seeds, clients, samples, width = x.shape
    seed_of, client_of = np.arange(seeds)[:, None, None], np.arange(clients)[None, :, None]
    everything, rng = np.arange(samples)[None, None], np.random.default_rng(rounds)
    pull = 2 * np.array(lambdas)[:, None, None, None]
    w = np.zeros((len(lambdas), seeds, clients, width))
    trace = Trace(*(np.zeros((rounds, len(lambdas), seeds)) for _ in range(3)))
    for t in range(rounds):
        full = gradient(w, x, y)
        trace.shared[t] = (full[..., SHARED].mean(2) ** 2).sum(-1)
        trace.local[t] = (full[..., MC] ** 2).sum(-1).mean(-1)
        anchor = w[..., MD].copy()
        for _ in range(STEPS):
            rows = everything if batch is None else rng.integers(samples, size=(seeds, clients, batch))
            step = gradient(w, x[seed_of, client_of, rows], y[seed_of, client_of, rows])
            step[..., MD] += pull * (w[..., MD] - anchor)
            w = w - eta * step
        trace.drift[t] = ((w[..., MD] - anchor) ** 2).sum(-1).mean(-1)
        w[..., SHARED] = w[..., SHARED].mean(2, keepdims=True)
    return trace


def slope(values: Array) -> float:
    """Of the logarithm of `values`, one for each of `ROUNDS`, over that of the rounds."""
    return float(np.polyfit(np.log(ROUNDS), np.log(values), 1)[0])


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    """For each of `ROUNDS`, with eta = 0.5 / sqrt(T) and every lambda."""
    data = problem()
    return [train(data, rounds, 0.5 / rounds**0.5, LAMBDAS) for rounds in ROUNDS]


def mean_gradients(traces: list[Trace], weight: float) -> Array:
    """G of each T, averaged over rounds and seeds."""
    return np.array([trace.gradient[:, LAMBDAS.index(weight)].mean() for trace in traces])


def mean_drifts(traces: list[Trace], weight: float) -> Array:
    """The drift of each T, averaged over rounds and seeds."""
    return np.array([trace.drift[:, LAMBDAS.index(weight)].mean() for trace in traces])


def decreases_as_the_root_of_t(values: Array) -> bool:
    """The test that the theorem's rate must pass, and that a control must fail."""
    scaled = np.sqrt(ROUNDS) * values
    return -0.75 <= slope(values) <= -0.40 and bool(scaled[-1] <= 1.3 * scaled[0])


def test_the_gradient_is_that_of_the_loss() -> None:
    """Central differences, at a point of no symmetry."""
    x, y = problem(seeds=1)
    w = np.random.default_rng(7).normal(size=(1, CLIENTS, 3 * PART))
    for j, unit in enumerate(np.eye(3 * PART)):
        numeric = (loss(w + 1e-5 * unit, x, y) - loss(w - 1e-5 * unit, x, y)) / 2e-5
        assert np.allclose(gradient(w, x, y)[..., j], numeric, atol=1e-8)


@pytest.mark.parametrize("weight", [0.1, 0.0, 1.0])
def test_the_mean_squared_gradient_falls_as_one_over_the_root_of_t(traces: list[Trace], weight: float) -> None:
    values = mean_gradients(traces, weight)
    assert decreases_as_the_root_of_t(values), (values, slope(values))


def test_drift_falls_as_one_over_t_and_with_lambda(traces: list[Trace]) -> None:
    assert slope(mean_drifts(traces, 0.1)) <= -0.7
    assert np.all(mean_drifts(traces, 1.0) < mean_drifts(traces, 0.1))
    assert np.all(mean_drifts(traces, 0.1) < mean_drifts(traces, 0.0))


def test_without_noise_a_constant_step_gives_one_over_t() -> None:
    data = problem()
    values = np.array([train(data, rounds, 0.1, (0.1,), batch=None).gradient.mean() for rounds in ROUNDS])
    assert slope(values) <= -0.85


def test_control_steps_that_are_too_small_do_not_pass() -> None:
    data = problem()
    values = np.array([train(data, rounds, 1e-4, (0.1,)).gradient.mean() for rounds in ROUNDS])
    assert not decreases_as_the_root_of_t(values)
    assert slope(values) > -0.1


def test_control_a_penalty_of_the_wrong_sign_raises_drift(traces: list[Trace]) -> None:
    """Most with the largest steps: twice the drift without a penalty at T = 16."""
    wrong, none = mean_drifts(traces, -1.0), mean_drifts(traces, 0.0)
    assert np.all(wrong > none)
    assert wrong[0] > 1.5 * none[0]


def test_more_clients_lower_the_noise_floor() -> None:
    """With a constant step G stays at a floor, lower for ten clients than for two.

    Averaging lowers the shared part alone, as 1/Z; the local part has no part in it and is about the same for any Z.
    """
    seeds, rounds = 16, 256
    two, ten = (train(problem(clients, seeds), rounds, 0.1, (0.1,)) for clients in (2, 10))
    last = slice(-rounds // 10, None)
    assert ten.gradient[last].mean() < two.gradient[last].mean()
    assert ten.shared[last].mean() < 0.5 * two.shared[last].mean()
