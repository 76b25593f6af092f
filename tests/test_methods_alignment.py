"""PAFP's formulas: moments, divergences, the server's target, and what inserting FA modules costs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wardround.federation.messages import Message
from wardround.methods.alignment import (
    Moments,
    RunningMoments,
    alignment_loss,
    batch_moments,
    divergence,
    moment_shape,
    site_weights,
)
from wardround.methods.alignment_target import distances, move_target, target_of, with_squares
from wardround.methods.insertion import insertion_cost, nearest_mean_accuracy
from wardround.methods.pafp import PAFP
from wardround.methods.trial import Network, Trial
from wardround.training.client import Client


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moments(seed: int, dtype: torch.dtype = torch.float64) -> Moments:
    """Means and variances `(3, 2, 2)` of an arbitrary distribution."""
    return Moments(draw(3, 2, 2, seed=seed).to(dtype), draw(3, 2, 2, seed=seed + 100).to(dtype).exp())


def normal(m: Moments) -> torch.distributions.Normal:
    return torch.distributions.Normal(m.mean, m.var.sqrt())


# ---- moments


@pytest.mark.parametrize(("reduce", "axes"), [("element", 0), ("channel", (0, 2, 3))])
def test_batch_moments_against_numpy(reduce: str, axes: int | tuple[int, ...]) -> None:
    h = draw(5, 3, 4, 2)
    found = batch_moments(h, reduce)  # type: ignore[arg-type]
    np.testing.assert_allclose(found.mean, h.numpy().mean(axes), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.var, h.numpy().var(axes), rtol=1e-5)
    assert tuple(found.mean.shape) == moment_shape((3, 4, 2), reduce)  # type: ignore[arg-type]


def test_one_image_has_variance_zero_and_a_finite_gradient() -> None:
    h = draw(1, 3, 2, 2).requires_grad_()
    found = batch_moments(h, "element")
    assert torch.equal(found.var, torch.zeros(3, 2, 2))
    divergence(found, moments(1, torch.float32), "kl", 1e-3).backward()
    assert torch.isfinite(h.grad).all()


def test_running_moments_assign_then_move_by_m() -> None:
    running = RunningMoments("channel", 0.25)
    batches = [draw(4, 3, 2, 2, seed=seed) for seed in range(3)]
    for batch in batches:
        running.update(batch)
    mean = batches[0].mean((0, 2, 3))
    for batch in batches[1:]:
        mean = 0.75 * mean + 0.25 * batch.mean((0, 2, 3))
    torch.testing.assert_close(running.now.mean, mean)


@pytest.mark.parametrize("m", [0.1, 1.0])
def test_gradients_pass_the_current_batch_scaled_by_m(m: float) -> None:
    """The history is detached; the first batch of a round assigns, with its whole gradient."""
    running = RunningMoments("element", m)
    first, second = draw(4, 3, 2, 2).requires_grad_(), draw(4, 3, 2, 2, seed=1).requires_grad_()
    running.update(first).mean.sum().backward()
    torch.testing.assert_close(first.grad, torch.full_like(first, 1 / 4))
    first.grad = None
    running.update(second).mean.sum().backward()
    torch.testing.assert_close(second.grad, torch.full_like(second, m / 4))
    assert first.grad is None


# ---- divergences


def test_kl_and_its_direction_against_torch_distributions() -> None:
    """The published direction is KL(target || client); `reverse_kl` is the other one."""
    local, target, eps = moments(0), moments(1), 1e-3
    fuzzy_local, fuzzy_target = Moments(local.mean, local.var + eps), Moments(target.mean, target.var + eps)
    forward = torch.distributions.kl_divergence(normal(fuzzy_target), normal(fuzzy_local)).mean()
    backward = torch.distributions.kl_divergence(normal(fuzzy_local), normal(fuzzy_target)).mean()
    torch.testing.assert_close(divergence(local, target, "kl", eps), forward)
    torch.testing.assert_close(divergence(local, target, "reverse_kl", eps), backward)
    assert abs(float(forward - backward)) > 0.1


def test_moments_divergence_by_hand() -> None:
    local = Moments(torch.tensor([1.0, 0.0]), torch.tensor([4.0, 1.0]))
    target = Moments(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]))
    assert divergence(local, target, "moments", 1e-12).item() == pytest.approx((1 + 1) / 2)


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "moments"])
def test_distances_are_zero_with_zero_gradient_at_equality(kind: str) -> None:
    target = moments(0)
    mean, var = target.mean.clone().requires_grad_(), target.var.clone().requires_grad_()
    loss = divergence(Moments(mean, var), target, kind, 1e-3)  # type: ignore[arg-type]
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-15)
    for gradient in (mean.grad, var.grad):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-15)


def test_the_released_fdse_term_is_no_distance() -> None:
    """At equality its gradient in the mean is -f/v, where KL's is 0; and it has no lower bound."""
    target = moments(0)
    mean = target.mean.clone().requires_grad_()
    divergence(Moments(mean, target.var), target, "fdse_released", 1e-3).backward()
    torch.testing.assert_close(mean.grad, -target.mean / (target.var + 1e-3) / mean.numel())
    far = Moments(torch.full_like(target.mean, 1e3), target.var)
    assert divergence(far, target, "fdse_released", 1e-3) < -1e3


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["kl", "reverse_kl", "moments"]))
def test_distances_are_not_negative(seed: int, kind: str) -> None:
    assert divergence(moments(seed), moments(seed + 1), kind, 1e-3) >= 0  # type: ignore[arg-type]


def test_dead_positions_stay_finite() -> None:
    dead = Moments(torch.zeros(2), torch.zeros(2))
    alive = Moments(torch.ones(2), torch.ones(2))
    for kind in ("kl", "reverse_kl", "moments", "fdse_released"):
        assert torch.isfinite(divergence(dead, alive, kind, 1e-3)), kind  # type: ignore[arg-type]


def test_site_weights() -> None:
    assert site_weights(2, "uniform", 0.1) == [0.5, 0.5]
    assert site_weights(2, "deeper", 0.1) == pytest.approx(
        [1 / (1 + math.exp(0.1)), math.exp(0.1) / (1 + math.exp(0.1))]
    )


def test_alignment_loss_weighs_the_mean_over_each_site() -> None:
    """A site with many elements counts no more than one with few."""
    many, few = Moments(torch.ones(50), torch.ones(50)), Moments(torch.ones(2), torch.ones(2))
    origin = [Moments(torch.zeros(50), torch.ones(50)), Moments(torch.zeros(2), torch.ones(2))]
    assert alignment_loss([many, few], origin, [0.25, 0.75], "kl", 1e-9).item() == pytest.approx(0.5)


# ---- the server's target


def test_the_target_over_three_rounds_by_hand() -> None:
    """Round 1 assigns; m_srv is the weight of the new round."""
    memory: dict[str, Tensor] = {}
    rounds = [(1.0, 4.0), (3.0, 2.0), (5.0, 8.0)]
    for mean, var in rounds:
        average = with_squares({"0/mean": torch.tensor([mean]), "0/var": torch.tensor([var])})
        move_target(memory, average, 0.1, "within")
    assert memory["0/mean"].item() == pytest.approx(0.9 * (0.9 * 1 + 0.1 * 3) + 0.1 * 5)
    assert memory["0/var"].item() == pytest.approx(0.9 * (0.9 * 4 + 0.1 * 2) + 0.1 * 8)


def test_without_memory_the_target_is_the_average() -> None:
    memory = {"0/mean": torch.tensor([7.0]), "0/var": torch.tensor([7.0])}
    average = with_squares({"0/mean": torch.tensor([0.1]), "0/var": torch.tensor([0.3])})
    move_target(memory, average, 1.0, "within")
    assert torch.equal(memory["0/mean"], average["0/mean"])


def averaged(parts: list[np.ndarray]) -> dict[str, Tensor]:
    """`sum_k p_k` of what clients with these rows `(n_k, d)` upload."""
    uploads = [
        with_squares({"0/mean": torch.from_numpy(part.mean(0)), "0/var": torch.from_numpy(part.var(0))})
        for part in parts
    ]
    pairs = [(len(part) / sum(map(len, parts)), upload) for part, upload in zip(parts, uploads, strict=True)]
    return {name: sum(share * upload[name] for share, upload in pairs) for name in uploads[0]}  # type: ignore[misc]


def test_total_variance_is_that_of_the_pooled_images() -> None:
    random = np.random.default_rng(0)
    parts = [
        random.normal(shift, spread, (count, 4)) for shift, spread, count in ((0, 1, 30), (3, 2, 10), (-1, 0.5, 5))
    ]
    memory: dict[str, Tensor] = {}
    move_target(memory, averaged(parts), 0.1, "total")
    pooled = np.concatenate(parts)
    found = target_of(memory)
    np.testing.assert_allclose(found["0/mean"], pooled.mean(0))
    np.testing.assert_allclose(found["0/var"], pooled.var(0))
    within: dict[str, Tensor] = {}
    move_target(within, averaged(parts), 0.1, "within")
    assert (target_of(within)["0/var"] < found["0/var"]).all()


def test_total_variance_moves_second_moments() -> None:
    """E[x^2] is what is averaged over rounds: a mean that moves adds to the spread."""
    memory: dict[str, Tensor] = {}
    for mean in (0.0, 2.0):
        average = with_squares({"0/mean": torch.tensor([mean]), "0/var": torch.tensor([1.0])})
        move_target(memory, average, 0.5, "total")
    assert target_of(memory)["0/mean"].item() == 1
    assert target_of(memory)["0/var"].item() == pytest.approx((1 + 5) / 2 - 1)


def test_a_variance_lost_to_rounding_is_zero_and_not_negative() -> None:
    """In float32 the second moment of large means with a small spread falls below the squared mean."""
    mean, var = torch.linspace(1000, 1100, 500), torch.full((500,), 1e-6)
    memory: dict[str, Tensor] = {}
    for step in range(4):
        move_target(memory, with_squares({"0/mean": mean + 1e-3 * step, "0/var": var}), 0.3, "total")
    found = target_of(memory)["0/var"]
    assert (memory["0/second"] - memory["0/mean"] ** 2).min() < 0
    assert found.min() >= 0
    local = Moments(mean, torch.ones(500))
    assert torch.isfinite(divergence(local, Moments(memory["0/mean"], found), "kl", 1e-3))


def test_distances_between_clients() -> None:
    """Two clients at -1 and 1 with variance 4 each lie 1/2 apart in units of their own spread."""
    uploads = [with_squares({"0/mean": torch.tensor([m]), "0/var": torch.tensor([4.0])}) for m in (-1.0, 1.0)]
    average = {name: (uploads[0][name] + uploads[1][name]) / 2 for name in uploads[0]}
    assert distances(average) == {"0": pytest.approx(0.5)}


# ---- what insertion costs


def test_nearest_mean_accuracy_by_hand() -> None:
    """Means from the first half: class 0 at 0, class 1 at 10. Class 2 is not among them and does not count."""
    features = torch.tensor([[-1.0], [1.0], [9.0], [11.0], [2.0], [9.0], [8.0], [50.0]])
    labels = torch.tensor([0, 0, 1, 1, 0, 1, 0, 2])
    assert nearest_mean_accuracy(features, labels) == pytest.approx(2 / 3)


@pytest.mark.parametrize("labels", [[], [0], [0, 1]])
def test_nearest_mean_accuracy_is_undefined_without_a_query(labels: list[int]) -> None:
    assert math.isnan(nearest_mean_accuracy(torch.zeros(len(labels), 2), torch.tensor(labels, dtype=torch.int64)))


def first_client(method: PAFP, **training: object) -> Client:
    """A client of a trial before it has trained."""
    trial = Trial(method, Network("wardround:cnn-gn", 20, 2), {"only": (6, 6, 6, 6)}, **training)
    return trial.answerer.load("only", Message({}, {"round": 1, "phase": "train"}))


def test_a_layer_that_is_the_identity_costs_nothing() -> None:
    for variant in ("conv_only", "gated", "delta"):
        found = insertion_cost(first_client(PAFP(variant=variant)))
        assert found == {
            "insertion_change/0": pytest.approx(0, abs=1e-5),
            "insertion_change/1": pytest.approx(0, abs=1e-5),
            "insertion_accuracy_drop": pytest.approx(0),
        }, variant


def test_the_published_form_changes_most_of_its_input() -> None:
    """Checked against the layers called by hand, on all 24 images in one batch."""
    client = first_client(PAFP(groups=8))
    found = insertion_cost(client)
    model, h = client.model, client.inputs.batch(torch.arange(24), None)
    with torch.no_grad():
        for site in range(2):
            after = model.before[site](h)
            assert found[f"insertion_change/{site}"] == pytest.approx(float((after - h).norm() / h.norm()), rel=1e-4)
            assert found[f"insertion_change/{site}"] > 0.3
            h = model.tuned[site](after)


def test_insertion_is_measured_once_and_logged() -> None:
    trial = Trial(PAFP(), Network("wardround:cnn-gn", 20, 2), ["large"]).run(2)
    first, second = (visit.up.scalars["log"] for visit in trial.visits())
    assert {"insertion_change/0", "insertion_change/1", "insertion_accuracy_drop"} <= first.keys()
    assert not [key for key in second if key.startswith("insertion")]
    quiet = Trial(PAFP(diagnostics=False), Network("wardround:cnn-gn", 20, 2), ["large"]).run(1)
    assert quiet.visits()[0].up.scalars["log"] == {}
    same = [v.up.tensors for v in (trial.visits()[0], quiet.visits()[0])]
    assert all(torch.equal(tensor, same[1][name]) for name, tensor in same[0].items())
