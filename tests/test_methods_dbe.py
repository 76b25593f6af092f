"""DBE: the client's running mean, the common mean and how it is found, the personal vector and its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from wardround.federation.messages import Message
from wardround.federation.rounds import TRAIN, RoundOptions
from wardround.federation.rules import Owner
from wardround.federation.server import Server
from wardround.methods.base import FedAvg
from wardround.methods.check import NETWORKS, PASSED, check_method
from wardround.methods.dbe import DBE, MEANS
from wardround.methods.trial import Network, Trial
from wardround.training.client import Client, Step

BN, GN = NETWORKS["bn-cnn"], Network("wardround:cnn-gn", 20, 2, head="shared", dropout=0.0)
SHARED_HEAD = Network("wardround:cnn-bn", 20, 2, head="shared")
ONE_BATCH = {"one": (2, 1, 1, 1), "two": (0, 1, 2, 0)}


def loaded(trial: Trial, name: str, round: int = 2, **targets: Tensor) -> Client:
    """A client that starts from the trial's first state, with a common mean if one is given."""
    tensors = {f"state/{n}": t for n, t in trial.side.initial_state.items()}
    tensors |= {f"target/{n}": t for n, t in targets.items()}
    return trial.answerer.load(name, Message(tensors, {"round": round, "phase": TRAIN}))


def everything(client: Client) -> Tensor:
    """The inputs of all training images, in their order."""
    return client.inputs.batch(torch.arange(len(client)), None)


def a_step(features: Tensor, vector: Tensor, scratch: dict[str, Any]) -> Step:
    """A step of which only the features are known, `z + r`."""
    neck = SimpleNamespace(get_parameter=lambda name: {"vector": vector}[name])
    client = SimpleNamespace(model=SimpleNamespace(neck=neck), scratch=scratch)
    return SimpleNamespace(features=features + vector, client=client)  # type: ignore[return-value]


# ---- the client's mean


BATCHES = [[[1.0, 8.0], [3.0, 0.0]], [[6.0, -4.0]], [[-2.0, 0.0], [0.0, 0.0], [2.0, 3.0]]]  # means (2,4) (6,-4) (0,1)


@pytest.mark.parametrize(
    ("momentum", "start", "expected"),
    [
        (1.0, "first", [[2, 4], [6, -4], [0, 1]]),
        (1.0, "zero", [[2, 4], [6, -4], [0, 1]]),
        (0.25, "first", [[2, 4], [3, 2], [2.25, 1.75]]),
        (0.25, "zero", [[0.5, 1], [1.875, -0.25], [1.40625, 0.0625]]),
    ],
)
def test_running_mean_by_hand(momentum: float, start: Any, expected: list[list[float]]) -> None:
    """Of the features before r is added."""
    method, scratch, vector = DBE(momentum=momentum, mean_start=start), {}, torch.tensor([0.5, -16.0])
    found = [method.running_mean(a_step(torch.tensor(batch), vector, scratch)).tolist() for batch in BATCHES]
    assert found == expected
    assert scratch["mean"].tolist() == expected[-1]


def test_a_start_from_zero_shrinks_the_mean() -> None:
    """pafp.md, section 4: 0.41 of it after five batches with m = 0.1."""
    for start, factor in (("first", 1.0), ("zero", 1 - 0.9**5)):
        scratch: dict[str, Any] = {}
        for _ in range(5):
            mean = DBE(momentum=0.1, mean_start=start).running_mean(a_step(torch.ones(4, 3), torch.zeros(3), scratch))
        torch.testing.assert_close(mean, torch.full((3,), factor))
    assert round(factor, 2) == 0.41


def test_gradients_pass_through_the_batch_alone() -> None:
    """To each of its images m / B; none to an earlier batch, and none to r."""
    scratch: dict[str, Any] = {}
    first, second = (torch.randn(4, 2, requires_grad=True) for _ in range(2))
    vector = torch.zeros(2, requires_grad=True)
    method = DBE(momentum=0.2)
    method.running_mean(a_step(first, vector, scratch))
    mean = method.running_mean(a_step(second, vector, scratch))
    gradients = torch.autograd.grad(mean.sum(), [second, vector, first], allow_unused=True)
    torch.testing.assert_close(gradients[0], torch.full((4, 2), 0.2 / 4))
    assert gradients[1] is not None
    assert gradients[1].abs().max() < 1e-7
    assert gradients[2] is None


# ---- the common mean


def test_the_common_mean_is_found_by_a_pass_that_is_undone() -> None:
    """With two epochs of one batch, m_k is the mean of z after one step of federated averaging from the start."""
    keys = {"batch_size": 8, "clip_norm": None}
    trial = Trial(DBE(), GN, ONE_BATCH, local_epochs=2, **keys).run(2)
    one_step = {visit.client: visit for visit in Trial(FedAvg(), GN, ONE_BATCH, **keys).run(1).visits()}
    means = {}
    for visit in trial.visits()[:2]:
        assert (visit.round, visit.phase) == (1, MEANS)
        assert visit.up.tensors.keys() == {"statistic/mean"}
        assert visit.up.scalars["loss"] > 0
        assert not visit.changed
        client = trial.new_answerer().load(visit.client, visit.down)
        client.model.load_state_dict(one_step[visit.client].up.under("state"), strict=False)
        with torch.no_grad():
            means[visit.client] = client.model.features(everything(client)).mean(0)
        torch.testing.assert_close(visit.up.tensors["statistic/mean"], means[visit.client], rtol=1e-4, atol=1e-6)
    common = (5 * means["one"] + 3 * means["two"]) / 8
    assert (means["one"] - means["two"]).abs().max() > 1e-4
    for visit in trial.visits()[2:]:
        assert visit.phase == TRAIN
        torch.testing.assert_close(visit.down.under("target")["mean"], common, rtol=1e-4, atol=1e-6)
        assert not visit.up.under("statistic")


def test_the_pass_leaves_no_trace_in_batch_norms_or_vectors() -> None:
    """The first round begins as federated averaging does, from the same state and at r = 0."""
    trial, plain = Trial(DBE(), BN).run(1), Trial(FedAvg(), SHARED_HEAD).run(1)
    passes, visits = trial.visits()[:4], trial.visits()[4:]
    assert not any(visit.changed for visit in passes)
    for visit, other in zip(visits, plain.visits(), strict=True):
        sent, expected = visit.down.under("state"), other.down.under("state")
        assert sent.keys() == expected.keys()
        assert all(torch.equal(tensor, sent[name]) for name, tensor in expected.items())
        assert not visit.before["neck.vector"].any()


def test_clients_that_join_later_get_the_first_rounds_mean() -> None:
    trial = Trial(DBE(), GN, ["large", "small"])
    trial.loop.options = RoundOptions(participation=0.5, evaluate_server=False)
    trial.run(6)
    first, *later = trial.visits()
    assert {visit.client for visit in later} == {"large", "small"}
    for visit in later:
        assert torch.equal(visit.down.under("target")["mean"], first.up.under("statistic")["mean"])


# ---- the loss


@pytest.mark.parametrize("momentum", [1.0, 0.3])
def test_the_loss_by_hand(momentum: float) -> None:
    """Of a first batch, whose mean is m_k whatever the momentum."""
    trial = Trial(DBE(), GN, ["small"], batch_size=16)
    target = torch.randn(trial.model.head.in_features, generator=torch.Generator().manual_seed(0))
    client = loaded(trial, "small", mean=target)
    with torch.no_grad():
        client.model.get_parameter("neck.vector").copy_(torch.linspace(-1, 1, len(target)))
        h = everything(client)
        z = client.model.pool(client.model.tuned[1](client.model.tuned[0](h)))
        logits = client.model.head(z + torch.linspace(-1, 1, len(target)))
        task = client.task_loss(logits, client.labels)
        gap = sum((float(m) - float(g)) ** 2 / 2 for m, g in zip(z.mean(0), target, strict=True)) / len(target)
    loss = DBE(kappa=7.0, momentum=momentum).loss(next(client.steps(1)))
    assert loss.item() == pytest.approx(task.item() + 7.0 * gap, rel=1e-5)


def test_the_pull_brings_means_together() -> None:
    """After some rounds the clients' mean features lie closer to the common one than without it."""
    far = []
    for kappa in (1e-9, 50.0):
        trial = Trial(DBE(kappa=kappa, vector_lr=0.0), GN, ["large", "small"], batch_size=16).run(6)
        target, distances = trial.loop.server.memory["mean"], []
        for visit in trial.visits(round=6):
            client = trial.answerer.load(visit.client, visit.down)
            client.model.load_state_dict(visit.up.under("state"), strict=False)
            with torch.no_grad():
                distances.append(float((client.model.features(everything(client)).mean(0) - target).norm()))
        far.append(sum(distances))
    assert far[1] < 0.7 * far[0]


# ---- the personal vector


@pytest.mark.parametrize("head", ["local", "shared"])
def test_the_vector_alone_is_personal(head: Any) -> None:
    model = Network("wardround:cnn-bn", 20, 2, head=head).model(DBE())
    rules = DBE().rules(model)
    assert rules.names(Owner.LOCAL) == ("neck.vector",)
    assert rules.owners["head.weight"] is Owner.SHARED
    assert model.get_parameter("neck.vector").shape == (model.head.in_features,)
    assert not model.get_parameter("neck.vector").any()


@pytest.mark.parametrize(("vector_lr", "rate"), [(None, 0.05), (0.4, 0.4)])
def test_the_vectors_step_by_hand(vector_lr: float | None, rate: float) -> None:
    """One step of plain SGD from r = 0: minus its rate times the sum over the batch of the task's gradient in z."""
    trial = Trial(DBE(), GN, ["small"], batch_size=16, clip_norm=None, weight_decay=0.5)
    client = loaded(trial, "small", mean=torch.zeros(trial.model.head.in_features))
    z = client.model.features(everything(client)).detach().requires_grad_()
    [gradient] = torch.autograd.grad(client.task_loss(client.model.head(z), client.labels), z)
    DBE(vector_lr=vector_lr).train(client, TRAIN)
    found = client.model.get_parameter("neck.vector")
    torch.testing.assert_close(found.detach(), -rate * gradient.sum(0), rtol=1e-3, atol=1e-7)


def test_the_vectors_rate_decays_and_its_weights_do_not() -> None:
    trial = Trial(DBE(), GN, ["small"], lr_decay=0.5, weight_decay=0.1)
    client, method = loaded(trial, "small", round=3), DBE(vector_lr=0.4)
    parameters = method.parameters(client)
    rest, own = method.optimizer(client, parameters).param_groups
    assert [(group["lr"], group["weight_decay"]) for group in (rest, own)] == [(0.0125, 0.1), (0.1, 0.0)]
    assert [id(p) for p in own["params"]] == [id(client.model.get_parameter("neck.vector"))]
    assert len(rest["params"]) == len(parameters) - 1


def test_predictions_add_the_vector() -> None:
    trial = Trial(DBE(), BN, ["small"]).run(2)
    visit = trial.visits()[-1]
    client = trial.answerer.load("small", visit.down)
    r = visit.after["neck.vector"]
    assert r.abs().max() > 0
    with torch.no_grad():
        inputs = everything(client)
        expected = client.model.head(client.model.pool(client.model.tuned[1](client.model.tuned[0](inputs))) + r)
        torch.testing.assert_close(DBE().predict(client, inputs), expected)


def test_a_vector_that_does_not_learn_stays_zero() -> None:
    visits = Trial(DBE(vector_lr=0.0), BN).run(2).visits()
    assert not any(visit.after["neck.vector"].any() for visit in visits)


# ---- reductions


def test_without_pull_and_vector_it_is_fedavg_with_a_shared_head() -> None:
    """To the bit, over three rounds of one exchange each."""
    ours, theirs = Trial(DBE(kappa=0.0, vector_lr=0.0), BN).run(3), Trial(FedAvg(), SHARED_HEAD).run(3)
    assert all(len(DBE(kappa=0.0).phases(round)) == 1 for round in (1, 2))
    for one, other in zip(ours.visits(), theirs.visits(), strict=True):
        state, expected = one.up.under("state"), other.up.under("state")
        assert state.keys() == expected.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in expected.items())
        assert one.up.scalars["loss"] == other.up.scalars["loss"]


def test_only_the_first_round_has_two_exchanges() -> None:
    assert [tuple(DBE().phases(round)) for round in (1, 2)] == [(MEANS, TRAIN), (TRAIN,)]


def test_nothing_but_the_common_mean_is_sent_of_the_servers_memory() -> None:
    """CCVR on top keeps things there too."""
    server = Server({}, {"uncalibrated/head.bias": torch.zeros(1)})
    assert DBE().targets(server, "") == {}
    DBE().absorb(server, {"mean": torch.ones(2)})
    DBE().absorb(server, {})
    assert {name: tensor.tolist() for name, tensor in DBE().targets(server, "").items()} == {"mean": [1, 1]}


@pytest.mark.parametrize("network", ["bn-cnn", "gn-cnn"])
def test_dbe_conforms(network: str) -> None:
    outcome = check_method(DBE(), network)
    assert {name for name, text in outcome.items() if text != PASSED} == {"averages"}
