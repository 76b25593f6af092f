"""Fed-CO2: a round by hand, who gets whose classifier, and what it is without its two extras."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from wardround.answering import MEMORY, under
from wardround.errors import RunError
from wardround.federation.messages import Message
from wardround.federation.server import Reply, Server
from wardround.methods.fedbn import FedBN
from wardround.methods.fedco2 import OFFLINE, FedCO2
from wardround.methods.peers import crossed_loss, distillation_loss
from wardround.methods.trial import Network, Trial
from wardround.models.classifier import Classifier
from wardround.training.client import Client, Step

GN = Network("wardround:cnn-gn", 20, 2, head="shared", dropout=0.0)
BN = Network("wardround:cnn-bn", 20, 2, head="shared")
PLAIN = {"loss": "cross-entropy", "class_weights": "none", "weight_decay": 0.0, "clip_norm": None}


def second_round(trial: Trial, name: str) -> tuple[Client, Message]:
    """Client `name` as it begins the second round, and what it answers in it."""
    trial.run(1)
    kept = {entry: tensor.clone() for entry, tensor in trial.answerer.store.get(name).items()}
    (visit,) = trial.run(2).visits(name, 2)
    again = trial.new_answerer()
    again.restore({name: kept})
    return again.load(name, visit.down), visit.up


def with_state(model: Classifier, state: dict[str, Tensor]) -> Classifier:
    """A copy of `model` with other entries."""
    other = copy.deepcopy(model)
    other.load_state_dict(state, strict=False)
    return other


def descend(model: Classifier, steps: Iterable[Step], loss: Callable[[Classifier, Step], Tensor]) -> list[float]:
    """Plain gradient descent, written out; the losses."""
    losses = []
    parameters = [p for p in model.parameters() if p.requires_grad]
    for step in steps:
        value = loss(model, step)
        for parameter, gradient in zip(parameters, torch.autograd.grad(value, parameters), strict=True):
            parameter.data -= 0.05 * gradient
        losses.append(float(value.detach()))
    return losses


def divergence(teacher: Classifier) -> Callable[[Classifier, Step], Tensor]:
    """`sum_c t_c log(t_c / s_c)`, mean over the batch."""
    fixed = copy.deepcopy(teacher)

    def loss(model: Classifier, step: Step) -> Tensor:
        t, s = (torch.softmax(network(step.inputs), 1) for network in (fixed, model))
        return (t.detach() * (t.detach() / s).log()).sum(1).mean()

    return loss


def supervised(classifiers: list[tuple[Tensor, Tensor]]) -> Callable[[Classifier, Step], Tensor]:
    """Cross-entropy of the model's own logits, and of those of each given classifier on its features."""

    def loss(model: Classifier, step: Step) -> Tensor:
        features = model.features(step.inputs)
        total = functional.cross_entropy(model.head(features), step.labels)
        for weight, bias in classifiers:
            total = total + functional.cross_entropy(features @ weight.T + bias, step.labels)
        return total

    return loss


@pytest.mark.parametrize(("distil", "cross"), [(True, True), (True, False), (False, True)])
def test_the_second_round_by_hand(distil: bool, cross: bool) -> None:
    """Teachers are the models as the round began, so the order in which the two models learn does not matter."""
    names = {"a": (2, 2, 1, 1), "b": (1, 1, 1, 1), "c": (0, 1, 2, 1)}
    trial = Trial(FedCO2(distil=distil, cross_classifiers=cross), GN, names, **PLAIN)
    client, reply = second_round(trial, "a")
    online = copy.deepcopy(client.model)
    offline = with_state(client.model, Message(client.memory).under(OFFLINE))
    first = [visit.up.under("statistic") for name in "bc" for visit in trial.visits(name, 1)]
    others = [(sent["weight"], sent["bias"]) for sent in first] if cross else []
    lessons = [(online, divergence(offline)), (offline, divergence(online))] if distil else []
    for model, lesson in lessons:
        descend(model, client.steps(1, "distillation"), lesson)
    seen = descend(online, client.steps(1), supervised(others))
    descend(offline, client.steps(1), supervised(others))
    assert len(others) == 2 * cross
    for name, tensor in reply.under("state").items():
        assert torch.allclose(tensor, online.state_dict()[name], rtol=1e-3, atol=1e-5), name
    assert reply.scalars["loss"] == pytest.approx(sum(seen) / len(seen), rel=1e-4)
    kept = under(MEMORY, trial.answerer.store.get("a"))
    for name, tensor in Message(kept).under(OFFLINE).items():
        assert torch.allclose(tensor, offline.state_dict()[name], rtol=1e-3, atol=1e-5), name


# ---- losses


def client_of(network: Network, name: str = "small") -> Client:
    """A client that has not been there before."""
    trial = Trial(FedCO2(), network, [name], **PLAIN)
    state = {f"state/{n}": t for n, t in trial.side.initial_state.items()}
    return trial.answerer.load(name, Message(state, {"round": 1, "phase": "train"}))


def test_a_teacher_is_in_eval_mode_and_gets_no_gradient() -> None:
    """Its batch norms keep their statistics; a student with the teacher's own predictions is at the minimum, 0."""
    client = client_of(Network("wardround:cnn-bn", 20, 2, dropout=0.0))
    teacher = client.reference()
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    loss = distillation_loss(next(iter(client.steps(1))), teacher)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    gradients = [p.grad for p in client.model.parameters() if p.grad is not None]
    assert gradients
    assert all(torch.allclose(g, torch.zeros_like(g), atol=1e-6) for g in gradients)
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert all(p.grad is None for p in teacher.parameters())


def test_the_divergence_is_from_teacher_to_student() -> None:
    client = client_of(GN)
    teacher = client.reference({"head.bias": torch.tensor([3.0, 0.0, -1.0, 0.5])})
    step = next(iter(client.steps(1)))
    t, s = (torch.softmax(network(step.inputs), 1).double() for network in (teacher, client.model))
    forward, reverse = (t * (t / s).log()).sum(1).mean(), (s * (s / t).log()).sum(1).mean()
    found = distillation_loss(step, teacher).item()
    assert found == pytest.approx(float(forward), rel=1e-4)
    assert found != pytest.approx(float(reverse), rel=1e-2)


def test_cross_terms_use_the_task_loss_and_reach_the_features_alone() -> None:
    client = client_of(GN)
    client.options = client.options.model_copy(update={"loss": "focal", "class_weights": "balanced"})
    stream = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(3, 4, client.model.head.in_features, generator=stream), torch.zeros(3, 4)
    step = next(iter(client.steps(1)))
    loss = crossed_loss(step, weight, bias)
    expected = sum(float(client.task_loss(step.features @ w.T, step.labels)) for w in weight)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert all(p.grad is None for p in client.model.head.parameters())
    assert all(p.grad is not None for p in client.model.tuned.parameters())


# ---- who gets what


def test_each_client_gets_the_offline_classifiers_of_all_others_that_have_images() -> None:
    trial = Trial(FedCO2(), GN).run(2)
    sent = {visit.client: visit.up.under("statistic") for visit in trial.visits(round=1)}
    assert not any(visit.down.under("target") for visit in trial.visits(round=1))
    for visit in trial.visits(round=2):
        others = [name for name in ("large", "single", "small") if name != visit.client]
        for part in ("weight", "bias"):
            expected = torch.stack([sent[name][part] for name in others])
            assert torch.equal(visit.down.under("target")[part], expected)
    offline = under(MEMORY, trial.answerer.store.get("small"))
    latest = trial.visits("small", 2)[0].up
    assert torch.equal(latest.tensors["statistic/weight"], offline[f"{OFFLINE}/head.weight"])
    assert not torch.equal(latest.tensors["statistic/weight"], latest.tensors["state/head.weight"])


def reply(client: str, value: float, examples: int = 1) -> Reply:
    """An answer whose tensors all have one value."""
    tensors = {"state/w": torch.full((2,), value), "statistic/weight": torch.full((2, 3), value)}
    return Reply(client, Message(tensors | {"statistic/bias": torch.full((2,), value)}, {"examples": examples}))


def test_the_server_keeps_the_last_classifier_of_every_client() -> None:
    server, method = Server({"w": torch.zeros(2)}), FedCO2()
    method.combine(server, "train", iter([reply("b", 1.0), reply("a/2", 3.0), reply("none", 9.0, examples=0)]))
    assert server.state["w"].tolist() == [2.0, 2.0]
    method.combine(server, "train", iter([reply("b", 5.0)]))
    assert {name: t.flatten()[0].item() for name, t in server.memory.items()} == {
        "weight/b": 5.0, "bias/b": 5.0, "weight/a/2": 3.0, "bias/a/2": 3.0,
    }  # fmt: skip
    assert method.targets(server, "new")["weight"][:, 0, 0].tolist() == [3.0, 5.0]
    assert method.targets(server, "b")["bias"].tolist() == [[3.0, 3.0]]
    assert method.targets(Server({}, {"weight/b": torch.ones(2, 3), "bias/b": torch.ones(2)}), "b") == {}


def test_a_lost_quorum_leaves_the_server_as_it_was() -> None:
    def replies() -> Iterator[Reply]:
        yield reply("a", 1.0)
        raise RunError("quorum")

    server = Server({"w": torch.zeros(2)})
    with pytest.raises(RunError):
        FedCO2().combine(server, "train", replies())
    assert not server.memory
    assert not server.state["w"].any()


# ---- reductions and predictions


def test_without_its_extras_the_online_model_is_fedbn_s() -> None:
    """To the bit, dropout included."""
    ours = Trial(FedCO2(distil=False, cross_classifiers=False), BN, ["large", "small"]).run(2)
    theirs = Trial(FedBN(), BN, ["large", "small"]).run(2)
    for one, other in zip(ours.visits(), theirs.visits(), strict=True):
        assert one.up.tensors.keys() == other.up.tensors.keys()
        assert all(torch.equal(tensor, other.up.tensors[name]) for name, tensor in one.up.tensors.items())
        assert all(torch.equal(tensor, other.after[name]) for name, tensor in one.after.items())
        assert one.up.scalars["loss"] == other.up.scalars["loss"]


def test_the_prediction_adds_both_models_and_the_server_s_model_is_the_online_one() -> None:
    trial = Trial(FedCO2(), BN, ["small"]).run(1)
    client = trial.answerer.load("small", trial.visits()[-1].down)
    inputs = client.inputs.batch(torch.arange(6), None)
    offline = with_state(client.model, Message(client.memory).under(OFFLINE)).eval()
    online = client.model(inputs)
    assert torch.equal(trial.method.predict_received(client, inputs), online)
    assert torch.allclose(trial.method.predict(client, inputs), online + offline(inputs), atol=1e-6)
    built = client.scratch[OFFLINE]
    trial.method.predict(client, inputs)
    assert client.scratch[OFFLINE] is built
    client.memory.clear()
    assert torch.equal(trial.method.predict(client, inputs), online)


def test_an_offline_model_starts_as_the_first_online_one() -> None:
    """Both then take the same batches, so without dropout they are one model after the first round."""
    (visit,) = Trial(FedCO2(), GN, ["small"]).run(1).visits()
    assert torch.equal(visit.up.tensors["statistic/weight"], visit.up.tensors["state/head.weight"])
    assert torch.equal(visit.up.tensors["statistic/bias"], visit.up.tensors["state/head.bias"])
