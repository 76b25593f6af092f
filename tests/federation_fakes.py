"""Small stand-ins for the client half and for a method, for the tests of the round loop and its transports."""

from __future__ import annotations

import errno
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wardround.federation.averaging import WeightedMean
from wardround.federation.codecs import CODECS, Codec
from wardround.federation.messages import Message, Schema, Spec
from wardround.federation.server import Reply, Server

FLOAT32 = CODECS["float32"]


def scores(balanced_accuracy: float | None, n: int = 2) -> dict[str, Any]:
    """Metrics of a split of two classes, as a client reports them."""
    shares = dict.fromkeys(("accuracy", "macro_f1", "auroc", "ece"), None)
    return {"n": n, **shares, "balanced_accuracy": balanced_accuracy, "support": [n, 0], "confusion": [[n, 0], [0, 0]]}


def evaluation(balanced_accuracy: float | None) -> dict[str, Any]:
    """An evaluation whose validation score is given."""
    return {"val": scores(balanced_accuracy), "test": scores(None), "seconds": 0.25}


Behaviour = Callable[[Message], Message | bytes]


@dataclass
class Scripted:
    """An answerer that calls one function a client."""

    behaviours: Mapping[str, Behaviour]
    codec: Codec = FLOAT32

    def answer(self, client: str, frame: bytes) -> bytes:
        """The encoded result of the client's function."""
        answer = self.behaviours[client](self.codec.decode(frame))
        return answer if isinstance(answer, bytes) else self.codec.encode(answer)


def plus(amount: float, message: Message, examples: int = 1) -> Message:
    """Answer with every float tensor raised by `amount`."""
    return Message({name: t + amount for name, t in message.tensors.items()}, {"examples": examples})


def fail(message: Message) -> Message:
    """A client with an error of its own."""
    raise LookupError("no images for today")


def full_disk(message: Message) -> Message:
    """A client whose state cannot be saved."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die(message: Message) -> Message:
    """A client whose worker is killed, as the system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def wait_for(file: Path, message: Message) -> Message:
    """A client that answers when `file` appears."""
    while not file.exists():
        time.sleep(0.005)
    return plus(0.0, message)


def interrupt_myself(message: Message) -> Message:
    """A client whose process gets the Ctrl-C that is meant for all."""
    os.kill(os.getpid(), signal.SIGINT)
    return plus(0.0, message)


def adders(count: int) -> dict[str, Behaviour]:
    """Clients `a`, `b`, ... that add 1, 2, ..."""
    return {chr(ord("a") + i): functools.partial(plus, float(i + 1)) for i in range(count)}


X = {"x": Spec((2,))}


def x(value: float) -> Message:
    """A message with one tensor of two equal values."""
    return Message({"x": torch.full((2,), value)})


@dataclass
class MeanMethod:
    """A server half that averages `state/w`, in one phase or more."""

    names: Sequence[str] = ("train",)
    individual: bool = False
    closing: Sequence[str] = ()
    asked: list[tuple[str, str]] = field(default_factory=list)
    seen: list[tuple[str, list[str]]] = field(default_factory=list)

    def phases(self, round: int) -> Sequence[str]:
        """The given ones."""
        return self.names

    def closing_phases(self) -> Sequence[str]:
        """The given ones."""
        return self.closing

    def reply_schema(self, phase: str) -> Schema:
        """One weight of two numbers."""
        return {"state/w": Spec((2,))}

    def outgoing(self, server: Server, client: str, phase: str) -> Mapping[str, Tensor]:
        """The weight; a client of its own gets one more for each letter of its name."""
        self.asked.append((phase, client))
        return {"state/w": server.state["w"] + len(client)}

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        """The mean weighted by examples."""
        mean, names = WeightedMean(), []
        for reply in replies:
            names.append(reply.client)
            mean.add(reply.message.under("state"), reply.examples)
        self.seen.append((phase, names))
        if mean.total:
            server.state = server.state | mean.result()
