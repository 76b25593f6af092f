"""Fed-RoD: both losses and their gradients by hand, whose each head is, and what each model predicts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wardround.federation.messages import Message
from wardround.federation.rules import Owner
from wardround.methods.base import FedAvg
from wardround.methods.fedrod import PERSONAL_HEAD, FedRoD
from wardround.methods.trial import Network, Trial
from wardround.training.client import Client

GN = Network("wardround:cnn-gn", 20, 2, dropout=0.0)
SHARED = Network("wardround:cnn-gn", 20, 2, head="shared", dropout=0.2)
COUNTS = {"large": (5, 4, 4, 0), "single": (0, 0, 1, 0)}


def loaded(method: FedRoD, name: str = "large") -> Client:
    """A client with a personal head that is not zero."""
    trial = Trial(method, GN, [name])
    state = {f"state/{n}": t for n, t in trial.side.initial_state.items()}
    client = trial.answerer.load(name, Message(state, {"round": 1, "phase": "train"}))
    with torch.no_grad():
        for number, parameter in enumerate(client.model.extras[PERSONAL_HEAD].parameters()):
            parameter.normal_(generator=torch.Generator().manual_seed(number))
    return client


def cross_entropy(logits: list[float], label: int, classes: list[int]) -> float:
    return -math.log(math.exp(logits[label]) / sum(math.exp(logits[c]) for c in classes))


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("generic", ["balanced-softmax", "cross-entropy"])
def test_the_loss_by_hand(name: str, generic: str) -> None:
    """`large` lacks the last class and `single` has only one, which take no part in the balanced softmax."""
    method = FedRoD(generic_loss=generic)
    client = loaded(method, name)
    step = next(iter(client.steps(1)))
    z_g = client.model.head(client.model.features(step.inputs)).tolist()
    z_p = client.model.extras[PERSONAL_HEAD](client.model.features(step.inputs)).tolist()
    total, counts = 0.0, COUNTS[name]
    for row, label in enumerate(step.labels.tolist()):
        if generic == "cross-entropy":
            total += cross_entropy(z_g[row], label, [0, 1, 2, 3])
        else:
            known = [c for c in range(4) if counts[c]]
            total += cross_entropy([z + math.log(n or 1) for z, n in zip(z_g[row], counts, strict=True)], label, known)
        total += cross_entropy([g + p for g, p in zip(z_g[row], z_p[row], strict=True)], label, [0, 1, 2, 3])
    assert method.loss(step).item() == pytest.approx(total / len(step.labels), rel=1e-5)


def test_neither_loss_reaches_the_parameters_of_the_other() -> None:
    """Base and generic head have the gradient of the balanced softmax alone; the personal head that of its loss."""
    method = FedRoD()
    client = loaded(method)
    step = next(iter(client.steps(1)))
    method.loss(step).backward()
    personal = list(client.model.extras[PERSONAL_HEAD].parameters())
    rest = [*client.model.tuned.parameters(), *client.model.head.parameters()]
    features = client.model.features(step.inputs)
    z = client.model.head(features)
    log_counts = torch.tensor([5.0, 4.0, 4.0, 0.0]).log()
    generic = -(z + log_counts).log_softmax(1).gather(1, step.labels[:, None]).mean()
    expected = torch.autograd.grad(generic, rest, retain_graph=True)
    both = z.detach() + client.model.extras[PERSONAL_HEAD](features.detach())
    expected += torch.autograd.grad(-both.log_softmax(1).gather(1, step.labels[:, None]).mean(), personal)
    for parameter, gradient in zip([*rest, *personal], expected, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_a_class_that_the_client_lacks_keeps_its_row_of_the_generic_head() -> None:
    visit = Trial(FedRoD(), GN, ["large"], weight_decay=0.0)
    (trained,) = visit.run(1).visits()
    before, after = visit.history.servers[0]["head.weight"], trained.up.tensors["state/head.weight"]
    assert torch.equal(before[3], after[3])
    assert all(not torch.equal(before[c], after[c]) for c in range(3))


def test_the_generic_head_is_shared_and_the_personal_one_local_whatever_the_model_says() -> None:
    for network in (GN, SHARED):
        side = Trial(FedRoD(), network, ["small"]).side
        assert {"head.weight", "head.bias"} <= set(side.rules.names(Owner.SHARED))
        assert set(side.rules.names(Owner.LOCAL)) == {f"extras.{PERSONAL_HEAD}.{part}" for part in ("weight", "bias")}


@pytest.mark.parametrize(("rate", "expected"), [(None, 0.05 * 0.5), (0.3, 0.3 * 0.5)])
def test_the_personal_head_has_its_own_group_and_rate(rate: float | None, expected: float) -> None:
    method, trial = FedRoD(personal_lr=rate), Trial(FedRoD(), GN, ["small"], lr_decay=0.5)
    state = {f"state/{n}": t for n, t in trial.side.initial_state.items()}
    client = trial.answerer.load("small", Message(state, {"round": 2, "phase": "train"}))
    rest, personal = method.optimizer(client, method.parameters(client)).param_groups
    assert rest["lr"] == 0.05 * 0.5
    assert personal["lr"] == expected
    assert [id(p) for p in personal["params"]] == [id(p) for p in client.model.extras[PERSONAL_HEAD].parameters()]
    assert len(rest["params"]) == len(method.parameters(client)) - 2


@pytest.mark.parametrize("clip", [None, 0.1])
def test_with_the_plain_loss_the_shared_part_is_federated_averaging(clip: float | None) -> None:
    """To the bit, and whatever the personal head's gradients are, since the two parts are clipped apart."""
    training = {"loss": "cross-entropy", "class_weights": "none", "clip_norm": clip}
    ours = Trial(FedRoD(generic_loss="cross-entropy"), SHARED, ["large", "small"], **training).run(2)
    theirs = Trial(FedAvg(), SHARED, ["large", "small"], **training).run(2)
    assert ours.history.servers[2].keys() == theirs.history.servers[2].keys()
    assert all(torch.equal(t, theirs.history.servers[2][n]) for n, t in ours.history.servers[2].items())


def test_the_personal_model_adds_both_heads_and_the_server_s_has_one() -> None:
    method = FedRoD()
    client = loaded(method)
    client.model.eval()
    inputs = client.inputs.batch(torch.arange(5), None)
    features: Tensor = client.model.features(inputs)
    generic = features @ client.model.head.weight.T + client.model.head.bias
    weight, bias = client.model.extras[PERSONAL_HEAD].parameters()
    assert torch.allclose(method.predict_received(client, inputs), generic, atol=1e-5)
    assert torch.allclose(method.predict(client, inputs), generic + features @ weight.T + bias, atol=1e-5)


def test_the_personal_model_starts_as_the_generic_one() -> None:
    assert all(not p.any() for p in GN.model(FedRoD()).extras[PERSONAL_HEAD].parameters())
