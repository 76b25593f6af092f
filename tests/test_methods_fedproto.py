"""FedProto: means of features in eval mode, their mean at the server, the distance to them, and what they predict."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from wardround.federation.codecs import PREFIX_BYTES, to_json
from wardround.federation.messages import Message, named
from wardround.federation.server import Reply, Server
from wardround.methods.base import ServerSide
from wardround.methods.check import NETWORKS, PASSED, check_method
from wardround.methods.fedproto import ABSENT, FedProto
from wardround.methods.isolated import Isolated
from wardround.methods.trial import CLASSES, Network, Trial, Visit
from wardround.training.client import Client, Step

BN, GN = NETWORKS["bn-cnn"], Network("wardround:cnn-gn", 20, 2, dropout=0.0)
OWNED = {"large": [0, 1, 2], "small": [0, 1, 2, 3], "single": [2], "empty": []}  # of the trial's clients


def features_one_by_one(client: Client, state: dict[str, Tensor]) -> np.ndarray:
    """Pooled features `(N, d)` of a client's training images by a model in eval mode."""
    client.model.load_state_dict(state, strict=False)
    client.model.eval()
    with torch.no_grad():
        rows = [client.model.features(client.inputs.batch(torch.tensor([i]), None)) for i in range(len(client))]
    return torch.cat(rows).numpy()


def loaded(trial: Trial, visit: Visit) -> Client:
    """The client of a visit, in a trial that has not begun."""
    return trial.new_answerer().load(visit.client, visit.down)


# ---- server


def reply(examples: int, **prototypes: list[float]) -> Reply:
    sent = {f"prototype/{name[1:]}": torch.tensor(values) for name, values in prototypes.items()}
    return Reply("anyone", Message(named("statistic", sent), {"examples": examples}))


@pytest.mark.parametrize(
    ("weights", "zero"), [("uniform", [3.0, 4.0]), ("examples", [(3 * 1 + 1 * 5) / 4, (3 * 2 + 1 * 6) / 4])]
)
def test_prototypes_are_means_over_the_clients_that_have_the_class(weights: str, zero: list[float]) -> None:
    """Class 1 is one client's, class 2 nobody's this time, class 3 never was anyone's."""
    server = Server({}, {"prototype/1": torch.tensor([9.0, 9.0]), "prototype/2": torch.tensor([7.0, 8.0])})
    replies = [reply(3, c0=[1.0, 2.0], c1=[0.5, 0.5]), reply(1, c0=[5.0, 6.0]), reply(0)]
    method = FedProto(weights=weights)  # type: ignore[arg-type]
    method.combine(server, "train", iter(replies))
    expected = {"prototype/0": zero, "prototype/1": [0.5, 0.5], "prototype/2": [7.0, 8.0]}
    assert {name: tensor.tolist() for name, tensor in server.memory.items()} == expected
    assert method.targets(server, "") == server.memory


def test_the_default_is_uniform() -> None:
    assert (FedProto().weights, FedProto().strength, FedProto().prediction) == ("uniform", 1.0, "prototype")


# ---- what travels


def test_elements_are_d_for_each_class_that_a_client_has() -> None:
    trial = Trial(FedProto(), BN).run(2)
    d = trial.model.head.in_features
    for visit in trial.visits():
        owned = OWNED[visit.client]
        assert set(visit.up.tensors) == {f"statistic/prototype/{c}" for c in owned}
        assert visit.up.elements == d * len(owned)
        assert set(visit.down.tensors) == {f"target/prototype/{c}" for c in range(CLASSES) if visit.round > 1}
        frame = trial.answerer.codec.encode(visit.up)
        start = PREFIX_BYTES + len(to_json(visit.up.scalars))
        header = int.from_bytes(frame[start : start + 8], "little")
        assert len(frame) == start + 8 + header + 4 * d * len(owned)
    assert trial.side.shared_elements == 0


def test_elements_of_resnet_4() -> None:
    """fm2.md, section 7: 168 numbers a class."""
    model = Network("wardround:resnet4", 16, 1).model(FedProto())
    assert ServerSide(FedProto(), model, 16).statistic_elements == 168 * CLASSES


def test_a_class_that_comes_late_is_added_and_one_that_is_gone_stays() -> None:
    """Two clients of one class each, one at a time."""
    trial = Trial(FedProto(), GN, {"one": (3, 0, 0, 0), "two": (0, 3, 0, 0)})
    taken = iter([["one"], ["two"], ["one", "two"]])
    trial.loop.participants = lambda round: next(taken)  # type: ignore[method-assign]
    trial.run(3)
    first, second, third, _ = trial.visits()
    assert not first.down.tensors
    assert set(second.down.under("target")) == {"prototype/0"}
    assert torch.equal(third.down.under("target")["prototype/0"], first.up.under("statistic")["prototype/0"])
    assert torch.equal(third.down.under("target")["prototype/1"], second.up.under("statistic")["prototype/1"])


# ---- client


@pytest.mark.parametrize("network", [BN, NETWORKS["gn-cnn"]])
def test_prototypes_are_means_after_training_in_eval_mode(network: Network) -> None:
    """Of every training image, by the network that training left; with batch norm and dropout in eval mode."""
    trial = Trial(FedProto(), network, ["large", "small"]).run(2)
    for visit in trial.visits(round=2):
        client = loaded(trial, visit)
        h, labels = features_one_by_one(client, dict(visit.after)), client.labels.numpy()
        before = features_one_by_one(client, dict(visit.before))
        for c in OWNED[visit.client]:
            sent = visit.up.under("statistic")[f"prototype/{c}"].numpy()
            np.testing.assert_allclose(sent, h[labels == c].mean(0), rtol=1e-4, atol=1e-6)
            assert np.abs(sent - before[labels == c].mean(0)).max() > 1e-4


def test_the_distance_by_hand() -> None:
    """Mean over the batch and over d; an image whose class has no prototype counts as 0."""
    trial = Trial(FedProto(), GN, ["small"])
    d = trial.model.head.in_features
    stream = torch.Generator().manual_seed(0)
    targets = {f"target/prototype/{c}": torch.randn(d, generator=stream) for c in (0, 3)}
    client = trial.answerer.load("small", Message(targets, {"round": 2, "phase": "train"}))
    seen: list[tuple[Tensor, Tensor, float, float]] = []

    class Probed(FedProto):
        """Notes the first step's batch, features and losses."""

        def loss(self, step: Step) -> Tensor:
            loss = super().loss(step)
            seen.append((step.features.detach(), step.labels, step.task_loss.item(), loss.item()))
            return loss

    Probed(strength=0.3).train(client, "train")
    h, labels, task, total = seen[0]
    squares = [
        float(((row - targets[f"target/prototype/{y}"]) ** 2).sum()) if y in (0, 3) else 0.0
        for row, y in zip(h.double(), labels.tolist(), strict=True)
    ]
    assert 0 < sum(y in (0, 3) for y in labels.tolist()) < len(labels)
    assert total == pytest.approx(task + 0.3 * sum(squares) / (len(labels) * d), rel=1e-5)


def test_only_images_with_a_prototype_feel_the_pull() -> None:
    trial = Trial(FedProto(), GN, ["small"])
    d = trial.model.head.in_features
    prototype = torch.randn(d, generator=torch.Generator().manual_seed(1))
    message = Message({"target/prototype/1": prototype}, {"round": 2, "phase": "train"})
    client = trial.answerer.load("small", message)
    FedProto().train(client, "train")
    step = next(client.steps(1))
    step.__dict__["features"] = h = step.features.detach().requires_grad_()
    pull = FedProto(strength=2.0).loss(step) - FedProto(strength=0.0).loss(step)
    [gradient] = torch.autograd.grad(pull, h)
    ones = step.labels == 1
    torch.testing.assert_close(gradient[ones], 2.0 * 2 * (h[ones] - prototype) / h.numel(), rtol=1e-4, atol=1e-7)
    assert gradient[~ones].abs().max() < 1e-7


@pytest.mark.parametrize(("strength", "rounds"), [(0.0, 3), (1.0, 1)])
def test_without_the_distance_it_is_isolated_training(strength: float, rounds: int) -> None:
    """To the bit: with lambda = 0 always, else in the first round, when there is no prototype yet."""
    ours, theirs = (Trial(method, BN).run(3).visits() for method in (FedProto(strength=strength), Isolated()))
    for one, other in zip(ours, theirs, strict=True):
        equal = all(torch.equal(tensor, other.after[name]) for name, tensor in one.after.items())
        assert equal == (one.round <= rounds or one.client == "empty")
        assert (one.up.scalars["loss"] == other.up.scalars["loss"]) == equal


# ---- prediction


def test_predictions_are_distances_to_received_prototypes() -> None:
    """By a loop; for the client's own classes alone. What was received goes before what the client found itself."""
    trial = Trial(FedProto(), BN, ["large", "small"]).run(2)
    visit = trial.visits("large")[-1]
    client = trial.answerer.load("large", visit.down)
    images = trial.federation.client("large").test
    logits = trial.answerer.logits(client, "test", images)
    inputs = trial.answerer.client_inputs("large", "test")
    for i in range(len(images)):
        with torch.no_grad():
            h = client.model.features(inputs.batch(torch.tensor([i]), None))[0].double()
        for c in range(CLASSES):
            prototype = visit.down.under("target")[f"prototype/{c}"].double()
            expected = -float(((h - prototype) ** 2).sum()) if c in OWNED["large"] else ABSENT
            assert logits[i, c] == pytest.approx(expected, rel=1e-3)


def test_own_prototypes_stand_in_for_those_not_received() -> None:
    trial = Trial(FedProto(), GN, {"one": (3, 3, 0, 0)})
    d = trial.model.head.in_features
    message = Message({"target/prototype/1": torch.ones(d)}, {"round": 2, "phase": "train"})
    client = trial.answerer.load("one", message)
    FedProto().train(client, "train")
    h = features_one_by_one(client, {})
    np.testing.assert_allclose(client.memory["prototypes"][0], h[client.labels == 0].mean(0), rtol=1e-4, atol=1e-6)
    assert torch.equal(client.memory["prototypes"][1], torch.ones(d))
    assert client.memory["present"].tolist() == [True, True, False, False]


def test_large_batches_are_predicted_as_accurately_as_single_images() -> None:
    """Prototypes far from 0 and close to the features: squares of norms would cancel to nothing."""
    trial = Trial(FedProto(), GN, ["large"])
    client = trial.answerer.load("large", Message({}, {"round": 1, "phase": "train"}))
    inputs = client.inputs.batch(torch.arange(13), None).repeat(4, 1, 1, 1)
    with torch.no_grad():
        client.model.tuned[-1].register_forward_hook(lambda module, args, output: output + 1000)
        h = client.model.features(inputs)
        client.memory = {"prototypes": h[:CLASSES].clone(), "present": torch.ones(CLASSES, dtype=torch.bool)}
        logits = FedProto().predict(client, inputs)
    expected = -((h.double()[:, None] - h.double()[:CLASSES]) ** 2).sum(2)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("prediction", "trained"), [("prototype", False), ("head", True)])
def test_the_head_predicts_where_it_is_asked_or_nothing_is_known(prediction: str, trained: bool) -> None:
    method = FedProto(prediction=prediction)  # type: ignore[arg-type]
    trial = Trial(method, BN, ["large"]).run(int(trained))
    client = trial.answerer.load("large", Message({}, {"round": 1, "phase": "train"}))
    inputs = client.inputs.batch(torch.arange(5), None)
    with torch.no_grad():
        assert torch.equal(method.predict(client, inputs), client.model(inputs))


def test_exported_models_take_the_prototypes_along() -> None:
    assert FedProto.predicts_from_memory


@pytest.mark.parametrize("network", ["bn-cnn", "gn-cnn"])
def test_fedproto_conforms(network: str) -> None:
    outcome = check_method(FedProto(), network)
    assert {name for name, text in outcome.items() if text != PASSED} == {"averages", "one_client"}
