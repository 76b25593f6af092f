"""Our half of `parity.py`: a small federation, where it stands after every round, and its batches for others to use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from wardround.federation.messages import Message, named
from wardround.federation.observers import Observer
from wardround.federation.server import Server
from wardround.federation.store import ClientStore
from wardround.methods.base import Method
from wardround.methods.trial import Network, Trial
from wardround.models.classifier import Classifier
from wardround.training.client import Client

# Training images of each of four classes. With batches of five, clients take 4, 2 and 6 steps an epoch, all of them
# whole; the last client lacks a class.
CLIENTS = {"four steps": (8, 2, 6, 4), "two steps": (3, 1, 2, 4), "six steps": (5, 15, 0, 10)}
BATCH, SIDE = 5, 20  # pixels
# Batch norms on batches of five make training chaotic at large rates: a rounding error grows tenfold a round.
RATES = {"cnn": 0.05, "cnn-bn": 0.005}
PLAIN = {"weight_decay": 0.0, "clip_norm": None, "loss": "cross-entropy", "class_weights": "none"}

State = dict[str, Tensor]
Part = Literal["server", "buffers", "clients"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A method in settings that both sides can have.

    Attributes:
        title: the method.
        settings: what was set to match, or what was left as shipped.
        method: ours.
        network: of `wardround:`.
        epochs: local epochs of ours.
        passes: for each pass that the other side makes over a client's images in a round, whose order of ours it
            gets: a purpose of `Client.steps`. Two passes with the same purpose continue one stream.
        setup: the same for passes before the first round, which get the orders of round 1.
        parts: what is compared: what the server keeps, the running statistics in it, what clients keep.
        because: why a part is expected to differ. A part that is not named here is expected to agree.
    """

    title: str
    settings: str
    method: Method
    network: Literal["cnn", "cnn-bn"] = "cnn"
    epochs: int = 1
    passes: Sequence[str] = ("batches",)
    setup: Sequence[str] = ()
    parts: Sequence[Part] = ("server",)
    because: Mapping[Part, str] = field(default_factory=dict)

    @property
    def lr(self) -> float:
        """The learning rate of both sides."""
        return RATES[self.network]


@dataclass(frozen=True)
class Standing:
    """What there is after a round: `state/...` are a model's entries, `memory/...` what a method keeps besides.

    Attributes:
        server: at the server.
        clients: at each client, in the order of `CLIENTS`: what it keeps for itself.
    """

    server: State
    clients: Sequence[State]

    def part(self, name: Part) -> list[State]:
        """The tensors of one part; counters are left out."""
        if name == "clients":
            return [_floating(client) for client in self.clients]
        wanted = name == "buffers"
        return [{key: t for key, t in _floating(self.server).items() if (".running_" in key) == wanted}]


def largest_difference(ours: Standing, theirs: Standing, part: Part) -> float:
    """Largest absolute difference of any number in what both sides have of `part`."""
    found = []
    for mine, other in zip(ours.part(part), theirs.part(part), strict=True):
        common = mine.keys() & other.keys()
        if not common:
            raise ValueError(f"{part}: nothing in common, {list(mine)[:3]} and {list(other)[:3]}")
        found += [(mine[name] - other[name]).abs().max() for name in common]
    return float(torch.stack(found).max())


class Ours:
    """A case on our side.

    Args:
        case: which.
        seed: of the initial weights and the order of the images.

    Attributes:
        start: the entries of the initial network that any method has: blocks, then the head, in the model's order.
    """

    def __init__(self, case: Case, seed: int = 0) -> None:
        network = Network(f"wardround:{case.network}", SIDE, "all", head="shared", dropout=0.0)
        settings = {"batch_size": BATCH, "lr": case.lr, "local_epochs": case.epochs, **PLAIN}
        self.case, self.trial = case, Trial(case.method, network, CLIENTS, seed, **settings)
        state = self.trial.model.state_dict().items()
        self.start = {name: tensor.clone() for name, tensor in state if name.startswith(("tuned.", "head."))}

    @cached_property
    def classifier(self) -> Classifier:
        """A model of its own, with the initial weights."""
        return self.trial.new_answerer().model

    @cached_property
    def replays(self) -> list[Replay]:
        """Every client's batches."""
        answerer = self.trial.new_answerer()
        message = Message(named("state", self.trial.side.initial_state), {"round": 1, "phase": "train"})
        return [Replay(answerer.load(name, message), self.case.passes) for name in CLIENTS]

    def run(self, rounds: int) -> list[Standing]:
        """Where our side stands after each round."""
        watch = _Watch(self.trial.answerer.store)
        self.trial.loop.observers = [watch]
        self.trial.run(rounds)
        return watch.standings

    def moved(self, end: Standing) -> float:
        """How far the weights of the first part went from the start: the scale of the differences."""
        states = end.part(self.case.parts[0])
        steps = [
            (tensor - self.start[name.removeprefix("state/")]).abs().max()
            for state in states
            for name, tensor in state.items()
            if name.removeprefix("state/") in self.start
        ]
        return float(torch.stack(steps).max()) if steps else float("nan")


class Replay:
    """A client's batches in the orders of `Client.steps`, for a loop that iterates over a loader.

    Args:
        client: of ours; its model is not used.
        passes: see `Case`.
    """

    def __init__(self, client: Client, passes: Sequence[str]) -> None:
        self.client, self.passes = client, passes
        self.start(1)

    def start(self, round: int, passes: Sequence[str] | None = None) -> None:
        """Begin a round, or what comes before the first with `passes` of its own."""
        self.client = replace(self.client, round=round)
        self._left = list(self.passes if passes is None else passes)
        self._streams: dict[str, Iterator[tuple[Tensor, Tensor]]] = {}

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass in batches of `size` images: inputs `(B, C, H, W)` and labels `(B,)`."""
        purpose = self._left.pop(0)
        if purpose not in self._streams:
            steps = self.client.steps(len(self.passes) + 1, purpose, size)
            self._streams[purpose] = ((step.inputs, step.labels) for step in steps)
        return itertools.islice(self._streams[purpose], self.count(size))

    def count(self, size: int) -> int:
        """Batches in a pass."""
        return len(self.client) // size


class _Watch(Observer):
    """Notes where a run stands after every round."""

    def __init__(self, store: ClientStore) -> None:
        self.store, self.standings = store, list[Standing]()

    def round_ended(self, round: int, server: Server) -> None:
        """Note it."""
        everywhere = named("state", server.state) | named("memory", server.memory)
        self.standings.append(Standing(everywhere, [self.store.get(name) for name in CLIENTS]))


def copy_in_order(module: nn.Module, start: Mapping[str, Tensor]) -> None:
    """Copy the entries of `start` into those of `module`, one after the other."""
    with torch.no_grad():
        for entry, tensor in zip(module.state_dict().values(), start.values(), strict=True):
            entry.copy_(tensor)


def renamed(tensors: Sequence[Tensor], names: Sequence[str], space: str = "state") -> State:
    """Copies of `tensors` under our names for them; fewer tensors than names are the first of them."""
    pairs = zip(names[: len(tensors)], tensors, strict=True)
    return {f"{space}/{name}": tensor.detach().clone() for name, tensor in pairs}


def within(names: Sequence[str], start: str) -> list[str]:
    """Those of `names` that begin with `start`."""
    return [name for name in names if name.startswith(start)]


def _floating(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
