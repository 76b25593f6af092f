"""CCVR: pooled Gaussians against NumPy, the calibrated head, when it happens, and on top of which methods."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from wardround.errors import InputError, RunError
from wardround.federation.messages import Message, named
from wardround.federation.rounds import EVALUATE, TRAIN
from wardround.federation.server import Reply, Server
from wardround.methods.base import FedAvg, Method
from wardround.methods.calibration import HEAD, MOMENTS
from wardround.methods.ccvr import CCVR, ccvr_on
from wardround.methods.check import PASSED, check_method
from wardround.methods.class_gaussians import ClassGaussians, class_moments, retrain, shrink
from wardround.methods.describing import describe_method
from wardround.methods.fedbn import FedBN
from wardround.methods.fedper import FedPer
from wardround.methods.fedprox import FedProx
from wardround.methods.isolated import Isolated
from wardround.methods.pafp import PAFP
from wardround.methods.registry import kind_of, method_from
from wardround.methods.trial import Network, Trial

GN = Network("wardround:cnn-gn", 20, 2, head="shared")
BN = Network("wardround:cnn-bn", 20, 2, head="shared")
LOCAL = Network("wardround:cnn-gn", 20, 2, head="local")
CLASSES, D = 4, 3
# Labels of three clients of unequal size: the second has one image of class 0 and none of class 1, the third a single
# image; nobody has class 3, and class 2 has one image in all.
LABELS = [[0] * 5 + [1] * 7, [0, 2], [1]]


def feature_sets() -> list[tuple[Tensor, Tensor]]:
    """Features, far from the origin, and labels of every client."""
    stream = torch.Generator().manual_seed(0)
    labels = [torch.tensor(of) for of in LABELS]
    return [(100 + torch.randn(len(of), D, generator=stream) + 2 * k, of) for k, of in enumerate(labels)]


def pooled(diagonal: bool = False) -> ClassGaussians:
    gaussians = ClassGaussians((CLASSES, D) if diagonal else (CLASSES, D, D))
    for features, labels in feature_sets():
        gaussians.add(**class_moments(features, labels, CLASSES, diagonal))
    return gaussians


# ---- Gaussians


def test_the_pooled_covariance_is_that_of_the_pooled_features() -> None:
    gaussians, variances = pooled(), pooled(diagonal=True)
    features, labels = (torch.cat(parts).numpy() for parts in zip(*feature_sets(), strict=True))
    assert gaussians.counts.tolist() == [6, 8, 1, 0]
    for label in (0, 1):
        rows = features[labels == label].astype(np.float64)
        assert np.allclose(gaussians.means[label], rows.mean(0), rtol=1e-6)
        assert np.allclose(gaussians.covariance(label), np.cov(rows.T), rtol=1e-4, atol=1e-4)
        assert np.allclose(variances.covariance(label), rows.var(0, ddof=1), rtol=1e-4, atol=1e-4)
    assert np.allclose(gaussians.means[2], features[labels == 2][0])
    assert not gaussians.covariance(2).any()
    assert not gaussians.means[3].any()


def test_pooling_is_equation_4() -> None:
    """Written as in the paper, from the clients' own moments."""
    moments = [class_moments(features, labels, CLASSES, False) for features, labels in feature_sets()]
    for label in (0, 1):
        n = [float(m["count"][label]) for m in moments]
        mu = [m["mean"][label].double().numpy() for m in moments]
        sigma = [m["covariance"][label].double().numpy() for m in moments]
        mean = sum(n_k / sum(n) * mu_k for n_k, mu_k in zip(n, mu, strict=True))
        total = sum(max(n_k - 1, 0) / (sum(n) - 1) * s for n_k, s in zip(n, sigma, strict=True))
        total = total + sum(n_k / (sum(n) - 1) * np.outer(m, m) for n_k, m in zip(n, mu, strict=True))
        total = total - sum(n) / (sum(n) - 1) * np.outer(mean, mean)
        assert np.allclose(pooled().covariance(label), total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("diagonal", [False, True])
def test_moments_of_one_client(diagonal: bool) -> None:
    """One image has a mean and no covariance; an absent class has neither."""
    features = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 5.0]])
    moments = class_moments(features, torch.tensor([1, 1, 0]), 3, diagonal)
    assert moments["count"].tolist() == [1, 2, 0]
    assert moments["mean"].tolist() == [[5, 5], [2, 4], [0, 0]]
    expected = [[0, 0], [2, 8], [0, 0]] if diagonal else [[[0, 0]] * 2, [[2, 4], [4, 8]], [[0, 0]] * 2]
    assert moments["covariance"].tolist() == expected


@pytest.mark.parametrize("diagonal", [False, True])
def test_draws_have_the_moments_of_their_class(diagonal: bool) -> None:
    gaussians = pooled(diagonal)
    features, labels = gaussians.draw(20_000, seed=0)
    assert labels.tolist() == [0] * 20_000 + [1] * 20_000 + [2] * 20_000
    for label in (0, 1):
        rows, covariance = features[labels == label].double(), gaussians.covariance(label)
        found = rows.var(0) if diagonal else torch.cov(rows.T)
        assert torch.allclose(rows.mean(0), gaussians.means[label], atol=0.05)
        assert torch.allclose(found, covariance, atol=0.05 * float(covariance.abs().max()))
    assert torch.equal(features[labels == 2], gaussians.means[2].float().expand(20_000, D))


def test_draws_of_a_class_depend_on_the_seed_and_not_on_other_classes() -> None:
    alone = ClassGaussians((CLASSES, D, D))
    for features, labels in feature_sets():
        alone.add(**class_moments(features[labels == 1], labels[labels == 1], CLASSES, False))
    all_of_them, labels = pooled().draw(5, seed=0)
    drawn, ones = alone.draw(5, seed=0)
    assert torch.allclose(drawn, all_of_them[labels == 1])
    assert ones.tolist() == [1] * 5
    assert not torch.allclose(drawn, alone.draw(5, seed=1)[0])


def test_shrinking_by_hand() -> None:
    """S = diag(4, 1, 1), n = 5: tr S = 6, tr S^2 = 18, rho = (18/3 + 36) / ((6 - 2/3) (18 - 12)) > 1; n = 20: less."""
    s = torch.diag(torch.tensor([4.0, 1.0, 1.0], dtype=torch.float64))
    assert torch.allclose(shrink(s, 5), 2 * torch.eye(3, dtype=torch.float64))
    rho = (18 / 3 + 36) / ((21 - 2 / 3) * 6)
    assert torch.allclose(shrink(s, 20), (1 - rho) * s + rho * 2 * torch.eye(3, dtype=torch.float64))
    assert torch.allclose(shrink(s, 1e9), s, atol=1e-6)
    assert not shrink(torch.zeros(3, 3, dtype=torch.float64), 1).any()


# ---- the head


def test_two_steps_of_the_head_by_hand() -> None:
    """`v <- 0.9 v + g`, `w <- w - lr v`, with the gradient of the mean cross-entropy."""
    features, labels = np.array([[1.0, 2.0], [0.5, -1.0], [3.0, 0.0]]), [0, 1, 1]
    w, b, v_w, v_b = np.array([[0.1, 0.2], [0.3, -0.1]]), np.zeros(2), np.zeros((2, 2)), np.zeros(2)
    start = [torch.tensor(w), torch.tensor(b)]
    found = retrain(start, torch.tensor(features), torch.tensor(labels), 2, 0.1, torch.Generator().manual_seed(0))
    for _ in range(2):
        z = np.exp(features @ w.T + b)
        error = (z / z.sum(1, keepdims=True) - np.eye(2)[labels]) / 3
        v_w, v_b = 0.9 * v_w + error.T @ features, 0.9 * v_b + error.sum(0)
        w, b = w - 0.1 * v_w, b - 0.1 * v_b
    assert np.allclose(found[0], w)
    assert np.allclose(found[1], b)
    assert start[1].tolist() == [0, 0]


def separable(seed: int) -> tuple[Tensor, Tensor]:
    """Thirty features of each of three classes, one a direction."""
    labels = torch.arange(3).repeat_interleave(30)
    noise = 0.3 * torch.randn(90, 3, generator=torch.Generator().manual_seed(seed))
    return 2 * torch.eye(3)[labels] + noise, labels


def biased_server() -> Server:
    """Its head calls everything class 0."""
    head = {"head.weight": 0.1 * torch.eye(3), "head.bias": torch.tensor([5.0, 0.0, 0.0])}
    return Server({"tuned.w": torch.ones(1), **head}, {"other": torch.ones(1)}, rounds=1)


def moment_replies(diagonal: bool = False) -> Iterator[Reply]:
    for seed in (0, 1):
        features, labels = separable(seed)
        tensors = named("statistic", class_moments(features, labels, 3, diagonal))
        yield Reply(str(seed), Message(tensors, {"examples": 90}))


def accuracy(server: Server) -> float:
    features, labels = separable(2)
    logits = features @ server.state["head.weight"].T + server.state["head.bias"]
    return float((logits.argmax(1) == labels).float().mean())


@pytest.mark.parametrize("covariance", ["full", "diagonal", "shrunk"])
def test_calibration_corrects_a_biased_head(covariance: Any) -> None:
    server = biased_server()
    assert accuracy(server) == pytest.approx(1 / 3)
    before = dict(server.state)
    method = CCVR(covariance=covariance, samples=200, calibration_lr=0.05)
    method.combine(server, MOMENTS, moment_replies(covariance == "diagonal"))
    assert accuracy(server) > 0.95
    assert torch.equal(server.state["tuned.w"], before["tuned.w"])
    assert before["head.bias"].tolist() == [5, 0, 0]
    again = biased_server()
    method.combine(again, MOMENTS, moment_replies(covariance == "diagonal"))
    assert all(torch.equal(tensor, again.state[name]) for name, tensor in server.state.items())


def test_a_lost_quorum_leaves_the_server_as_it_was() -> None:
    def replies() -> Iterator[Reply]:
        yield from moment_replies()
        raise RunError("quorum")

    server = biased_server()
    with pytest.raises(RunError):
        CCVR(samples=1).combine(server, MOMENTS, replies())
    assert server.state["head.bias"].tolist() == [5, 0, 0]
    assert server.memory.keys() == {"other"}


def test_a_round_without_images_changes_nothing() -> None:
    server = biased_server()
    nothing = {"count": torch.zeros(3), "mean": torch.zeros(3, 3), "covariance": torch.zeros(3, 3, 3)}
    CCVR().combine(server, MOMENTS, iter([Reply("a", Message(named("statistic", nothing), {"examples": 0}))]))
    assert torch.equal(server.state["head.weight"], 0.1 * torch.eye(3))


# ---- in the loop


@pytest.mark.parametrize(("ours", "theirs"), [(CCVR, FedAvg), (ccvr_on(FedProx), FedProx)])
def test_the_head_is_calibrated_once_after_the_last_round(ours: type[Method], theirs: type[Method]) -> None:
    """Until then it is the method beneath, to the bit; so are the personal models."""
    keys = {"mu": 1.0} if theirs is FedProx else {}
    trial = Trial(ours(samples=10, **keys), GN, ["large", "single"]).run(2)
    plain = Trial(theirs(**keys), GN, ["large", "single"]).run(2)
    assert [(v.round, v.phase) for v in trial.visits("large")] == [(1, TRAIN), (2, TRAIN), (2, MOMENTS)]
    trained = [visit for visit in trial.visits() if visit.phase == TRAIN]
    for one, other in zip(trained, plain.visits(), strict=True):
        assert all(torch.equal(tensor, other.up.tensors[name]) for name, tensor in one.up.tensors.items())
    after, expected = trial.history.servers[2], plain.history.servers[2]
    assert {name for name, tensor in after.items() if not torch.equal(tensor, expected[name])} == set(HEAD)
    assert all(torch.equal(t, plain.history.servers[1][n]) for n, t in trial.history.servers[1].items())


def test_clients_measure_features_of_the_model_that_was_just_averaged() -> None:
    trial = Trial(CCVR(samples=10), BN, ["large", "single", "empty"]).run(1)
    (visit,) = [visit for visit in trial.visits("large") if visit.phase == MOMENTS]
    assert visit.up.under("state") == {}
    assert not visit.changed
    model = BN.model(FedAvg())
    model.load_state_dict(visit.down.under("state"), strict=False)
    data = trial.federation.client("large").train
    with torch.no_grad():
        images = model.eval().prefix(model.prepare(torch.from_numpy(data.images)))
        features = model.features(images).double().numpy()
    moments = visit.up.under("statistic")
    assert moments["count"].tolist() == [5, 4, 4, 0]
    for label in range(3):
        rows = features[data.labels == label]
        assert np.allclose(moments["mean"][label], rows.mean(0), rtol=1e-4, atol=1e-6)
        assert np.allclose(moments["covariance"][label], np.cov(rows.T), rtol=1e-3, atol=1e-6)
    (single,) = [visit for visit in trial.visits("single") if visit.phase == MOMENTS]
    assert not single.up.tensors["statistic/covariance"].any()
    (empty,) = [visit for visit in trial.visits("empty") if visit.phase == MOMENTS]
    assert not any(tensor.any() for tensor in empty.up.tensors.values())


def test_the_final_evaluation_gets_the_calibrated_head_and_a_longer_run_the_one_before() -> None:
    trial = Trial(CCVR(samples=10), GN, ["large", "small"]).run(1)
    calibrated = trial.history.servers[1]["head.weight"]
    sent = trial.side.outgoing(trial.loop.server, "", EVALUATE)
    assert torch.equal(sent["state/head.weight"], calibrated)
    longer, straight = trial.run(2), Trial(CCVR(samples=10), GN, ["large", "small"]).run(2)
    started, expected = (of.visits("large", 2)[0] for of in (longer, straight))
    assert not torch.equal(started.down.tensors["state/head.weight"], calibrated)
    assert all(torch.equal(tensor, expected.down.tensors[name]) for name, tensor in started.down.tensors.items())
    assert all(torch.equal(t, straight.history.servers[2][n]) for n, t in longer.history.servers[2].items())
    assert longer.loop.server.memory.keys() == straight.loop.server.memory.keys()


def test_it_conforms_with_a_shared_head() -> None:
    outcome = check_method(CCVR(samples=5), GN)
    reasons = {name: text for name, text in outcome.items() if text != PASSED}
    assert reasons.keys() <= {"averages", "one_client", "persistence"}


# ---- on top of other methods


class PassesItsMemoryOn(FedAvg):
    """Sends all that the server remembers, as methods may."""

    def target_shapes(self, side: Any) -> dict[str, tuple[int, ...]]:
        return {"mine": (1,)}

    def targets(self, server: Server, client: str) -> dict[str, Tensor]:
        return server.memory

    def absorb(self, server: Server, average: Any) -> None:
        server.memory["mine"] = torch.ones(1)


def test_a_method_does_not_see_what_the_calibration_keeps() -> None:
    trial = Trial(ccvr_on(PassesItsMemoryOn)(samples=5), GN, ["small"]).run(1).run(2)
    assert trial.visits()[-1].down.under("target").keys() == {"mine"}
    assert trial.side.outgoing(trial.loop.server, "", EVALUATE).keys() >= {"target/mine"}


@pytest.mark.parametrize(
    ("kind", "network", "culprit"),
    [
        (CCVR, LOCAL, "head.weight"),
        (ccvr_on(FedPer), GN, "head.weight"),
        (ccvr_on(Isolated), GN, "tuned.0"),
        (ccvr_on(FedBN), BN, "tuned.0"),
        (ccvr_on(PAFP), GN, "before.0"),
    ],
)
def test_refused_without_features_and_a_head_for_all(kind: type[Method], network: Network, culprit: str) -> None:
    with pytest.raises(InputError, match=rf"{kind.name.replace('+', '.')}: CCVR needs .*{culprit}"):
        network.model(kind())


def test_a_method_without_anything_personal_is_accepted() -> None:
    GN.model(ccvr_on(FedBN)())


def test_a_composed_method_has_the_keys_of_both() -> None:
    kind = ccvr_on(FedProx)
    assert kind is kind_of("fedprox+ccvr")
    assert kind is ccvr_on(FedProx)
    assert issubclass(kind, FedProx)
    assert kind.name == "fedprox+ccvr"
    assert {"mu", "samples", "covariance", "weights"} <= kind.model_fields.keys()
    method = method_from({"name": "fedprox+ccvr", "mu": 0.5, "samples": 7})
    assert method.to_toml()["mu"] == 0.5
    assert method.to_toml()["samples"] == 7
    assert "Luo" in kind.citation
    assert "Sahu" in kind.citation


def test_a_composed_method_keeps_the_defaults_of_the_one_beneath() -> None:
    assert ccvr_on(FedBN)().weights == "uniform"
    assert ccvr_on(FedPer)().weights == "examples"


def test_it_is_put_on_once() -> None:
    assert ccvr_on(CCVR) is CCVR
    assert ccvr_on(ccvr_on(FedProx)) is ccvr_on(FedProx)


def test_a_composed_method_goes_to_another_process() -> None:
    method = ccvr_on(FedProx)(mu=0.5, samples=7, covariance="shrunk")
    assert pickle.loads(pickle.dumps(method)) == method


def test_names() -> None:
    keys = {entry["key"] for entry in describe_method("FedProx+CCVR")["keys"]}
    assert {"mu", "samples"} <= keys
    with pytest.raises(InputError, match="there is no method 'nothing"):
        method_from({"name": "nothing+ccvr"})
    assert kind_of("nothing") is None
