"""fluke's half of `parity.py` (PyPI `fluke-fl`): its own clients and servers, called in the order of its own loop.

What is replaced: the loader, by one that has our batches. Nothing is evaluated, which takes no change.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from parity_ours import BATCH, Case, Ours, Replay, Standing, State, copy_in_order, renamed, within
from wardround.methods.base import FedAvg
from wardround.methods.ditto import Ditto
from wardround.methods.fedbn import FedBN
from wardround.methods.fedlc import FedLC
from wardround.methods.fedper import FedPer
from wardround.methods.fedproto import FedProto
from wardround.methods.fedprox import FedProx
from wardround.methods.fedrep import FedRep
from wardround.methods.fedrod import FedRoD
from wardround.methods.moon import MOON
from wardround.methods.scaffold import SCAFFOLD
from wardround.methods.trial import CLASSES

Kept = Callable[[Any, Sequence[str]], State]


# ---- what is read of them, and changed in them, case by case -------------------------------------------------------


def entries(model: nn.Module, names: Sequence[str], space: str = "state") -> State:
    """A model's entries under our names."""
    return renamed(list(model.state_dict().values()), names, space)


def server_variates(server: Any, names: Sequence[str]) -> State:
    """The server's model and SCAFFOLD's c."""
    return entries(server.model, names) | renamed(list(server.control.values()), names, "memory")


def server_prototypes(server: Any, names: Sequence[str]) -> State:
    """FedProto's prototypes."""
    return {f"memory/prototype/{c}": mean.clone() for c, mean in enumerate(server.prototypes) if mean is not None}


def personal_head(client: Any, names: Sequence[str]) -> State:
    """Fed-RoD's second head."""
    head = client.inner_model.state_dict()
    return {f"state/extras.personal_head.{name}": tensor.clone() for name, tensor in head.items()}


def as_shipped(client: Any, network: nn.Module) -> None:
    """Change nothing."""


def zero_personal_head(client: Any, network: Any) -> None:
    """Fed-RoD's second head starts at zero."""
    client.inner_model = copy.deepcopy(network.head)
    for parameter in client.inner_model.parameters():
        nn.init.zeros_(parameter)


# ---- cases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FlukeCase(Case):
    """A case with what their side needs.

    Attributes:
        module: of `fluke.algorithms`.
        algorithm: their class in it.
        args: keys of their clients.
        server_args: keys of their server.
        weighted: whether their server weighs clients by their images.
        own_models: whether their clients are given a model.
        travels: the part of their network that their server has.
        layers: how their network is built: blocks inside an encoder, or one sequence of layers, `layer00` to `layer11`
            or 0 to 11.
        change: what is changed in each of their clients before the first round, given their network.
        common: what their server has.
        own: what their clients keep.
    """

    module: str
    algorithm: str
    args: Mapping[str, Any] = field(default_factory=dict)
    server_args: Mapping[str, Any] = field(default_factory=dict)
    weighted: bool = True
    own_models: bool = False
    travels: Callable[[Any], nn.Module] = lambda network: network
    layers: Literal["nested", "named", "numbered"] = "nested"
    change: Callable[[Any, Any], None] = as_shipped
    common: Kept = lambda server, names: entries(server.model, names)
    own: Kept = lambda client, names: {}


FEDBN_NESTED = (
    "fluke's FedBN forgets the names of outer modules, so it does not find the batch norms of a network whose parts "
    "have parts: they are overwritten in every round, and it is FedAvg. Ours goes by type."
)
FEDBN_PREFIX = (
    "fluke's FedBN takes whatever begins with the name of a batch norm for a part of it: layer 1 is one, so the head, "
    "layer 11, stays local as well."
)
PROTOTYPES = (
    "fluke gathers prototypes while the network is still learning. Ours computes them after training, in eval mode."
)
ROD_START = "fluke's personal heads start as copies of the generic one, ours at zero, so that z_G + z_P starts as z_G."

BASE: dict[str, Any] = {"own_models": True, "travels": lambda network: network.encoder, "parts": ("server", "clients")}
BN: dict[str, Any] = {
    "title": "FedBN", "module": "fedbn", "algorithm": "FedBN", "network": "cnn-bn", "parts": ("server", "clients"),
    "own": lambda client, names: entries(client.model, names), "method": FedBN(), "weighted": False,
}  # fmt: skip
ROD: dict[str, Any] = {
    "title": "Fed-RoD", "module": "fedrod", "algorithm": "FedROD", "parts": ("server", "clients"),
    "own": personal_head, "method": FedRoD(),
}  # fmt: skip

CASES = (
    FlukeCase(title="FedAvg", settings="weighted", method=FedAvg(), module="fedavg", algorithm="FedAVG"),
    FlukeCase(
        title="FedAvg", settings="weighted, with batch norms", method=FedAvg(), module="fedavg", algorithm="FedAVG",
        network="cnn-bn", parts=("server", "buffers"),
    ),
    FlukeCase(
        title="FedProx", settings="mu = 0.1, weighted", method=FedProx(mu=0.1), module="fedprox", algorithm="FedProx",
        args={"mu": 0.1},
    ),
    FlukeCase(
        title="SCAFFOLD", settings="not weighted", method=SCAFFOLD(), module="scaffold", algorithm="SCAFFOLD",
        weighted=False, parts=("server", "clients"), common=server_variates,
        own=lambda client, names: renamed(list(client.control.values()), names, "memory"),
    ),
    FlukeCase(
        title="Ditto", settings="lambda = 1, tau = 1, weighted", method=Ditto(**{"lambda": 1.0}), module="ditto",
        algorithm="Ditto", args={"lam": 1.0, "tau": 1}, passes=("batches", "personal"), own_models=True,
        parts=("server", "clients"), own=lambda client, names: entries(client.personalized_model, names, "memory"),
    ),
    FlukeCase(
        **BASE, title="FedPer", settings="weighted", method=FedPer(), module="fedper", algorithm="FedPer",
        own=lambda client, names: entries(client.model.get_local(), within(names, "head.")),
    ),
    FlukeCase(
        **BASE, title="FedRep", settings="tau = 1, weighted", method=FedRep(), module="fedrep", algorithm="FedRep",
        args={"tau": 1}, passes=("head", "batches"),
        own=lambda client, names: entries(client.model.get_local(), within(names, "head.")),
    ),
    FlukeCase(**BN, settings="one sequence of layers", layers="named"),
    FlukeCase(
        **BN, settings="the same, layers numbered", layers="numbered",
        because={"server": FEDBN_PREFIX, "clients": FEDBN_PREFIX},
    ),
    FlukeCase(
        **BN, settings="blocks in an encoder", because={"server": FEDBN_NESTED, "clients": FEDBN_NESTED},
    ),
    FlukeCase(
        title="MOON", settings="mu = 1, T = 0.5, no projection, weighted", method=MOON(projection=0), module="moon",
        algorithm="MOON", args={"mu": 1.0, "tau": 0.5},
    ),
    FlukeCase(
        title="FedProto", settings="lambda = 1", method=FedProto(), module="fedproto", algorithm="FedProto",
        args={"lam": 1.0, "n_protos": CLASSES}, server_args={"n_protos": CLASSES}, own_models=True,
        parts=("clients", "server"), common=server_prototypes,
        own=lambda client, names: entries(client.model, names),
        because={"server": PROTOTYPES, "clients": PROTOTYPES},
    ),
    FlukeCase(**ROD, settings="personal heads start at 0, weighted", change=zero_personal_head),
    FlukeCase(**ROD, settings="weighted", because={"clients": ROD_START}),
    FlukeCase(
        title="FedLC", settings="tau = 1, weighted", method=FedLC(), module="fedlc", algorithm="FedLC",
        args={"tau": 1.0},
    ),
)  # fmt: skip


# ---- running them --------------------------------------------------------------------------------------------------


class Fluke:
    """The installed package.

    Attributes:
        version: as pip knows it.
    """

    name = "fluke"
    cases: Sequence[FlukeCase] = CASES

    def __init__(self) -> None:
        try:
            self.version = importlib.metadata.version("fluke-fl")
        except importlib.metadata.PackageNotFoundError:
            raise SystemExit("--fluke: pip install fluke-fl first") from None

    def run(self, case: FlukeCase, ours: Ours, rounds: int) -> list[Standing]:
        """Where their side stands after each round, with the batches of `ours`."""
        kind = getattr(importlib.import_module(f"fluke.algorithms.{case.module}"), case.algorithm)
        names, network = list(ours.start), self.network(case, ours)
        clients = self.clients(case, kind.get_client_class(kind), ours.replays, network)
        model = None if case.title == "FedProto" else copy.deepcopy(case.travels(network))
        server = kind.get_server_class(kind)(
            model=model, test_set=None, clients=clients, weighted=case.weighted, **case.server_args
        )
        for client in clients:
            client.set_channel(server.channel)
        standings = []
        for round in range(1, rounds + 1):
            for replay in ours.replays:
                replay.start(round)
            server.broadcast_model(clients)
            for client in clients:
                client.local_update(round)
            server.aggregate(clients, server.receive_client_models(clients, state_dict=False))
            standings.append(Standing(case.common(server, names), [case.own(client, names) for client in clients]))
        return standings

    def clients(self, case: FlukeCase, kind: type, replays: Sequence[Replay], network: nn.Module) -> list[Any]:
        """Their clients with our batches."""
        config = importlib.import_module("fluke.config").OptimizerConfigurator({"name": "SGD", "lr": case.lr})
        clients = []
        for number, replay in enumerate(replays):
            given = {"model": copy.deepcopy(network)} if case.own_models else {}
            client = kind(
                index=number, train_set=_loader(replay), test_set=None, optimizer_cfg=config,
                loss_fn=nn.CrossEntropyLoss(), local_epochs=1, **given, **case.args,
            )  # fmt: skip
            case.change(client, network)
            clients.append(client)
        return clients

    def network(self, case: FlukeCase, ours: Ours) -> nn.Module:
        """Our blocks and head as their kind of network, or as one sequence of layers, with our weights."""
        nets, model = importlib.import_module("fluke.nets"), copy.deepcopy(ours.classifier)
        if case.layers == "nested":
            network: nn.Module = nets.EncoderHeadNet(nn.Sequential(*model.tuned), model.head)
        else:
            form = "layer{:02}" if case.layers == "named" else "{}"
            layers = [*(layer for block in model.tuned for layer in block), model.head]
            network = nn.Sequential(OrderedDict((form.format(n), layer) for n, layer in enumerate(layers)))
        copy_in_order(network, ours.start)
        return network


def _loader(replay: Replay) -> Any:
    """Our batches as the loader that their clients ask for the number of images and for all labels."""
    base: type = importlib.import_module("fluke.data").FastDataLoader

    class Loader(base):  # type: ignore[misc]
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return replay.batches(BATCH)

    rows = torch.arange(len(replay.client))
    return Loader(replay.client.inputs.batch(rows, None), replay.client.labels, num_labels=CLASSES, batch_size=BATCH)
