"""What the server knows, and what a method's server half must answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from wardround.federation.messages import Message, Schema


@dataclass
class Server:
    """The server's side of a run.

    Attributes:
        state: the shared entries of the model, by name.
        memory: tensors that a method keeps at the server between rounds (a target distribution, a control variate).
        round: the last round that is complete; 0 before the first.
        log: numbers of the current round for the report; emptied every round.
    """

    state: dict[str, Tensor]
    memory: dict[str, Tensor] = field(default_factory=dict)
    round: int = 0
    log: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """A client's answer that passed every check."""

    client: str
    message: Message

    @property
    def examples(self) -> int:
        """Training images that the answer stands for."""
        return int(self.message.scalars["examples"])


class ServerHalf(Protocol):
    """A method as the round loop sees it."""

    @property
    def individual(self) -> bool:
        """Whether clients get different messages. If not, one message is made and encoded for all."""

    def phases(self, round: int) -> Sequence[str]:
        """The exchanges of a round, in order; most methods have one, `train`."""

    def reply_schema(self, phase: str) -> Schema:
        """What tensors a reply holds."""

    def outgoing(self, server: Server, client: str, phase: str) -> Mapping[str, Tensor]:
        """The tensors to send to `client`."""

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        """Fold the replies into `server`. They come one at a time, in the order of the clients."""
