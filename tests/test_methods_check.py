"""The conformance suite: our methods pass it on every network, and deliberately wrong ones do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from wardround.federation.rules import BATCH_NORMS, Owner, Rules, modules_of_type
from wardround.federation.server import Reply, Server
from wardround.methods.base import FedAvg, Method, ServerSide
from wardround.methods.check import CHECKS, NETWORKS, PASSED, check_method
from wardround.methods.checks import check_names, check_ownership
from wardround.methods.isolated import Isolated
from wardround.methods.pafp import PAFP
from wardround.methods.pafp_alt import PAFPAlt
from wardround.methods.registry import METHODS as REGISTERED
from wardround.methods.trial import Bench, Network
from wardround.models.classifier import Classifier
from wardround.training.client import Client, Step

SMALL = ["bn-cnn", "gn-cnn", "resnet4", "vit-tiny"]
METHODS: dict[str, Method] = {
    "isolated": Isolated(),
    "fedavg": FedAvg(),
    "pafp": PAFP(),
    "pafp-alt": PAFPAlt(),
    "pafp-alt additive": PAFPAlt(schedule="additive", every=1, head_always=True, lr_local=0.1),
}


@pytest.mark.parametrize("network", SMALL)
@pytest.mark.parametrize("name", METHODS)
def test_our_methods_conform(name: str, network: str) -> None:
    outcome = check_method(METHODS[name], network)
    assert outcome.keys() == CHECKS.keys()
    if network == "vit-tiny" and isinstance(METHODS[name], PAFP):
        assert all("feature maps" in text for text in outcome.values())
    else:
        reasons = {text.removeprefix("not applicable: ") for text in outcome.values() if text != PASSED}
        nothing = {"nothing is shared", "nothing that is shared is averaged"} if name == "isolated" else set()
        assert reasons == ({"nothing is local"} if (name, network) == ("fedavg", "vit-tiny") else nothing)


# What does not apply to a method, whatever the network.
OWN_WAY = frozenset({"the method aggregates in its own way", "nothing that is shared is averaged"})
NOT_APPLICABLE: dict[str, frozenset[str] | set[str]] = {
    "isolated": {"nothing is shared", "nothing that is shared is averaged"},
    "fedproto": OWN_WAY | {"nothing is shared"},
    **dict.fromkeys(("dbe", "lp++"), frozenset({"a round has several exchanges"})),
    **dict.fromkeys(("scaffold", "fedco2", "fdse", "ccvr", "fedlora", "fm2"), OWN_WAY),
}


ON_TEXT = {"clip-zeroshot", "cocoop", "facmic", "fedapt", "fedclip", "fedmedclip", "lp++", "promptfl"}


@pytest.mark.parametrize("name", sorted(ON_TEXT))
def test_every_method_on_an_encoder_conforms(name: str) -> None:
    """A frozen network with a text side; without one, they say what they need."""
    outcome = check_method(REGISTERED[name](), "encoder")
    reasons = {text.removeprefix("not applicable: ") for text in outcome.values() if text != PASSED}
    nothing = {"everything is frozen", "nothing is shared", "nothing that is shared is averaged"}
    applies_not = nothing if name == "clip-zeroshot" else NOT_APPLICABLE.get(name, set())
    assert reasons <= {"nothing is local"} | applies_not
    assert all("has no text side" in text for text in check_method(REGISTERED[name](), "resnet4").values())


@pytest.mark.parametrize("network", ["resnet4", "vit-tiny"])
@pytest.mark.parametrize("name", sorted(REGISTERED.keys() - {"isolated", "fedavg", "pafp", "pafp-alt"} - ON_TEXT))
def test_every_registered_method_conforms(name: str, network: str) -> None:
    """Batch norms in residual blocks with a local head; tokens, nothing frozen and a shared head."""
    head = "shared" if name == "ccvr" else NETWORKS[network].head
    outcome = check_method(REGISTERED[name](), replace(NETWORKS[network], head=head))
    reasons = {text.removeprefix("not applicable: ") for text in outcome.values() if text != PASSED}
    if len(set(outcome.values())) == 1 and reasons:
        assert (name, network) in {("fdse", "vit-tiny"), ("fedlora", "resnet4")}
    else:
        assert reasons <= NOT_APPLICABLE.get(name, set()) | {"nothing is local"}


@pytest.mark.parametrize(("name", "network"), [("pafp-alt", "efficientnet-b0"), ("fedavg", "densenet121")])
def test_deeply_nested_networks_conform(name: str, network: str) -> None:
    assert set(check_method(METHODS[name], network, rounds=2).values()) == {PASSED}


@pytest.mark.parametrize("network", NETWORKS)
def test_rules_of_every_network(network: str) -> None:
    """The light checks alone, on the networks that are too large for a whole trial here."""
    bench = Bench(FedAvg(), NETWORKS[network])
    check_ownership(bench)
    check_names(bench)


# ---- FedBN, right and wrong


class FedBN(FedAvg):
    """Li et al., ICLR 2021: batch norms are local, selected by type."""

    def rules(self, model: Classifier) -> Rules:
        rules = super().rules(model)
        return rules.local(*modules_of_type(model.tuned, BATCH_NORMS))


class FedBNByName(FedAvg):
    """The usual mistake."""

    def rules(self, model: Classifier) -> Rules:
        rules = super().rules(model)
        named = [module for name, module in model.tuned.named_modules() if "bn" in name.split(".")[-1]]
        return rules.local(*named)


def test_a_method_of_an_outside_author_conforms() -> None:
    assert check_method(FedBN(), "resnet4")["persistence"] == PASSED


@pytest.mark.parametrize("network", ["resnet4", "efficientnet-b0"])
def test_fedbn_by_name_is_caught(network: str) -> None:
    """Even on EfficientNet-B0, none of whose names holds "bn", so that it silently is FedAvg."""
    with pytest.raises(AssertionError, match="do not select by name"):
        check_names(Bench(FedBNByName(), NETWORKS[network]))


# ---- wrong methods, each with the check that must catch it


class LeakInState(FedAvg):
    def state_for(self, server: Server, client: str) -> Mapping[str, Tensor]:
        return {**server.state, "head.weight": torch.ones(4, 512)}


class LeakInStatistics(FedAvg):
    """Calls its local head a statistic."""

    def statistic_shapes(self, model: Classifier, image_size: int, phase: str) -> Mapping[str, Sequence[int]]:
        return {"norms": tuple(model.head.weight.shape)}

    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        return {"norms": client.model.head.weight}


class LeakOfFrozen(LeakInStatistics):
    def statistic_shapes(self, model: Classifier, image_size: int, phase: str) -> Mapping[str, Sequence[int]]:
        return {"norms": (next(model.frozen.parameters()).numel(),)}

    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        return {"norms": next(client.model.frozen.parameters()).flatten()}


class LeakThroughTheServer(LeakInStatistics):
    """The head is hidden on the way up, and handed on to everyone."""

    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        hide = 2.0 if client.name == "large" else 0.0
        return {"norms": hide * client.model.head.weight}

    def digest(self, reply: Reply) -> Mapping[str, Tensor]:
        return {}

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        kept = list(replies)
        server.memory["norms"] = next(r.message.tensors["statistic/norms"] for r in kept if r.client == "large") / 2
        super().combine(server, phase, iter(kept))

    def targets(self, server: Server, client: str) -> Mapping[str, Tensor]:
        return server.memory


class UnannouncedStatistic(FedAvg):
    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        return {"extra": torch.zeros(2)}


class MissingStatistic(LeakInStatistics):
    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        return {}


class ThawedPrefix(FedAvg):
    """Leaves the frozen blocks in the rules as shared."""

    def rules(self, model: Classifier) -> Rules:
        return Rules.of(model).local(model.head)


class TwoOwners(FedAvg):
    """Ties a shared parameter to the local head's bias: one tensor, two owners."""

    def edit(self, model: Classifier, image_size: int) -> None:
        model.add_module("spare", nn.Linear(1, 1))
        model.spare.bias = model.head.bias  # type: ignore[union-attr]


class MovesFrozenBuffers(FedAvg):
    """Freezes a block by rule, but lets its batch norm's running statistics drift."""

    def rules(self, model: Classifier) -> Rules:
        return super().rules(model).frozen(model.tuned[0])

    def fixed_statistics(self) -> bool:
        return False


class TrainsFrozen(FedAvg):
    def rules(self, model: Classifier) -> Rules:
        return super().rules(model).frozen(model.tuned[0])

    def parameters(self, client: Client) -> list[nn.Parameter]:
        return [*client.model.tuned.parameters(), *client.model.head.parameters()]


class TrainsNothing(FedAvg):
    def parameters(self, client: Client) -> list[nn.Parameter]:
        return []


class SkipsBuffers(FedAvg):
    """PFLlib and FLamby: only what `parameters()` lists is averaged; buffers stay as they were."""

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        before = dict(server.state)
        super().combine(server, phase, replies)
        buffers = [name for name in before if "running" in name or "num_batches" in name]
        server.state |= {name: before[name] for name in buffers}


class AveragesEqually(FedAvg):
    """Weighs by images, says that it does, and does not."""

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        kept = [r for r in replies if r.examples]
        for name in server.state:
            stack = torch.stack([r.message.tensors[f"state/{name}"] for r in kept])
            server.state[name] = stack.mean(0) if stack.is_floating_point() else stack.amax(0)


class Damped(FedAvg):
    """Shrinks the average."""

    def absorb(self, server: Server, average: Mapping[str, Tensor]) -> None:
        server.state = {n: t * 0.5 if t.is_floating_point() else t for n, t in server.state.items()}


class SharesLocalState(FedAvg):
    """Keeps the last client's head in the class, where the next client finds it."""

    shelf: ClassVar[dict[str, Tensor]] = {}

    def train(self, client: Client, phase: str) -> float:
        if client.name == "large" and client.round == 1:
            self.shelf.clear()
        if self.shelf:
            client.model.head.load_state_dict(self.shelf)
        loss = super().train(client, phase)
        self.shelf.update({name: tensor.clone() for name, tensor in client.model.head.state_dict().items()})
        return loss


class SameHeadForAll(FedAvg):
    """The local head never learns from its client, yet changes."""

    def train(self, client: Client, phase: str) -> float:
        loss = super().train(client, phase)
        with torch.no_grad():
            for parameter in client.model.head.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
        return loss


class ChangesWhatItReceived(LeakInStatistics):
    """Adds to the server's targets in place; they are the same object for the next client."""

    def statistic_shapes(self, model: Classifier, image_size: int, phase: str) -> Mapping[str, Sequence[int]]:
        return {"mean": (3,)}

    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        return {"mean": client.received["mean"] if client.received else torch.ones(3)}

    def train(self, client: Client, phase: str) -> float:
        if client.received:
            client.received["mean"].add_(1)  # type: ignore[union-attr]
        return super().train(client, phase)

    def absorb(self, server: Server, average: Mapping[str, Tensor]) -> None:
        server.memory |= average

    def targets(self, server: Server, client: str) -> Mapping[str, Tensor]:
        return server.memory


class Unseeded(FedAvg):
    def loss(self, step: Step) -> Tensor:
        noise = torch.Generator()
        noise.seed()
        return super().loss(step) * (1 + 0.1 * torch.rand((), generator=noise))


class LeavesFlagsChanged(FedAvg):
    def train(self, client: Client, phase: str) -> float:
        loss = super().train(client, phase)
        client.model.head.requires_grad_(False)
        return loss


class LeavesTrainingMode(FedAvg):
    def train(self, client: Client, phase: str) -> float:
        loss = super().train(client, phase)
        client.model.train()
        return loss


class DividesByAbsentClasses(FedAvg):
    def loss(self, step: Step) -> Tensor:
        counts = step.client.counts
        return super().loss(step) * (step.logits.sum(0).abs() * (counts.sum() / counts)).mean()


class NeedsTwoImages(FedAvg):
    """The spread of a batch's logits is undefined for one image; spares the client that has no more."""

    def loss(self, step: Step) -> Tensor:
        spread = step.logits.std(0).mean() if len(step.client) > 1 else 0.0
        return super().loss(step) + spread


class PredictsInTrainingMode(FedAvg):
    def predict(self, client: Client, inputs: Tensor) -> Tensor:
        client.model.train()
        logits: Tensor = client.model(inputs)
        return logits


class PredictsByTheBatch(FedAvg):
    def predict(self, client: Client, inputs: Tensor) -> Tensor:
        logits = super().predict(client, inputs)
        return logits - logits.mean(0)


class CountsEmptyClients(FedAvg):
    """Every reply weighs the same, also one without images."""

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        kept = list(replies)
        for name in server.state:
            stack = torch.stack([r.message.tensors[f"state/{name}"] for r in kept])
            if stack.is_floating_point():
                server.state[name] = stack.mean(0)


# (method, network, the check that must catch it, and what it must say)
WRONG: list[tuple[type[Method], str, str, str]] = [
    (LeakInState, "bn-cnn", "wire", "'head.weight' is local and may not travel"),
    (LeakInStatistics, "bn-cnn", "wire", "'head.weight': private, but sent by client 'large' as 'norms'"),
    (LeakOfFrozen, "bn-cnn", "wire", "'frozen.0.0.weight': private, but sent by client 'large' as 'norms'"),
    (LeakThroughTheServer, "bn-cnn", "wire", "'head.weight': private, but sent to client 'large' as 'norms'"),
    (UnannouncedStatistic, "bn-cnn", "wire", "unexpected tensor 'statistic/extra'"),
    (MissingStatistic, "bn-cnn", "wire", "tensor 'statistic/norms' is missing"),
    (ThawedPrefix, "bn-cnn", "ownership", "in the frozen blocks and not frozen"),
    (TwoOwners, "bn-cnn", "ownership", "are one tensor with two owners"),
    (FedBNByName, "efficientnet-b0", "names", "do not select by name"),
    (MovesFrozenBuffers, "bn-cnn", "frozen", "'tuned.0.1.num_batches_tracked'.*changed by client 'large' in round 1"),
    (TrainsFrozen, "bn-cnn", "frozen", "'tuned.0.0.bias'.*changed by client 'large' in round 1"),
    (TrainsNothing, "bn-cnn", "training", "nothing changes"),
    (DividesByAbsentClasses, "bn-cnn", "wire", "training went wrong: tensor '.*' holds .* not finite"),
    (SkipsBuffers, "bn-cnn", "averages", "'tuned.0.1.running_mean' is not the weighted average"),
    (AveragesEqually, "bn-cnn", "averages", "is not the weighted average"),
    (Damped, "gn-cnn", "one_client", "not the only client's own in round 1"),
    (SameHeadForAll, "bn-cnn", "persistence", "local, and the same at two clients: head.weight, head.bias"),
    (SharesLocalState, "bn-cnn", "independence", "depends on who else was there"),
    (Unseeded, "bn-cnn", "determinism", "differs in a second run"),
    (LeavesFlagsChanged, "bn-cnn", "restored", "'head.bias', 'head.weight': with requires_grad left changed"),
    (LeavesTrainingMode, "bn-cnn", "restored", "left in training mode"),
    (NeedsTwoImages, "bn-cnn", "small_batches", "training went wrong"),
    (CountsEmptyClients, "gn-cnn", "empty_client", "different at the server with a client that has no images"),
    (PredictsInTrainingMode, "bn-cnn", "prediction", "changed by predicting"),
    (PredictsByTheBatch, "bn-cnn", "prediction", "an image's logits depend on the images beside it"),
]


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(("kind", "network", "check", "problem"), WRONG)
def test_wrong_methods_are_caught(kind: type[Method], network: str, check: str, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        CHECKS[check](Bench(kind(), NETWORKS[network]))


def test_the_suite_names_the_method_and_the_check() -> None:
    with pytest.raises(AssertionError, match=r"^fedavg, averages: 'tuned.0.1.running_mean' is not"):
        check_method(SkipsBuffers(), "bn-cnn")


def test_every_check_is_failed_by_some_wrong_method() -> None:
    """One that nothing fails would be an ornament."""
    assert {check for _, _, check, _ in WRONG} == CHECKS.keys()


def test_changes_to_what_was_received_stay_with_the_client() -> None:
    """The engine hands out copies, so that even this careless method keeps clients apart."""
    assert check_method(ChangesWhatItReceived(), "gn-cnn")["independence"] == PASSED


def test_the_default_average_ignores_empty_clients_whatever_they_weigh() -> None:
    class Uniform(FedAvg):
        def weight(self, reply: Reply) -> float:
            return 1.0

    assert check_method(Uniform(), "bn-cnn")["empty_client"] == PASSED


def test_a_network_of_ones_own() -> None:
    outcome = check_method(FedAvg(), Network("wardround:cnn", 16, 1, head="shared"), rounds=2)
    assert {check: text for check, text in outcome.items() if text != PASSED} == {
        "persistence": "not applicable: nothing is local"
    }


def test_server_side_counts_what_travels() -> None:
    network = NETWORKS["bn-cnn"]
    model = network.model(PAFP())
    side = ServerSide(PAFP(), model, network.image_size)
    shared = side.rules.names(Owner.SHARED)
    assert side.shared_elements == sum(model.state_dict()[name].numel() for name in shared)
    assert side.statistic_elements == 2 * (32 * 8 * 8 + 64 * 2 * 2)
