"""What the server knows, and what a method's server half must answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

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
        clients: how many clients the federation has, whether or not they take part in a round.
        rounds: how many rounds the run has; what goes on after a finished run has more than before.
        seed: the experiment's, for draws of the server's own.
        names: of all clients, in their order.
    """

    state: dict[str, Tensor]
    memory: dict[str, Tensor] = field(default_factory=dict)
    round: int = 0
    log: dict[str, float] = field(default_factory=dict)
    clients: int = 0
    rounds: int = 0
    seed: int = 0
    names: tuple[str, ...] = ()

    def snapshot(self) -> Server:
        """The server as it is now, whatever entries are replaced later; tensors must not be changed in place."""
        return replace(self, state=dict(self.state), memory=dict(self.memory), log={})


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
        """The exchanges of a round, in order. Most methods have one, `train`, which every round has once."""

    def closing_phases(self) -> Sequence[str]:
        """The exchanges that follow those of the last round, with its clients. Most methods have none."""

    def reply_schema(self, phase: str) -> Schema:
        """What tensors a reply holds."""

    def outgoing(self, server: Server, client: str, phase: str) -> Mapping[str, Tensor]:
        """The tensors to send to `client`."""

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        """Fold the replies into `server`. They come one at a time, in the order of the clients.

        Tensors of the server are replaced, never changed in place: a message may still be on its way. If the quorum
        is lost, the iterator raises at its end; what is set only after that leaves the server as it was.
        """


class IndividualMessages(Mapping[str, Message]):
    """A message for each client, made when it is looked up, so that they are never all in memory.

    Args:
        method: makes them.
        server: as it is at the start of the exchange.
        phase: of the round.
        clients: whom they are for.
        scalars: the same for all.
    """

    def __init__(
        self, method: ServerHalf, server: Server, phase: str, clients: Sequence[str], scalars: Mapping[str, Any]
    ) -> None:
        self._method, self._server, self._phase = method, server.snapshot(), phase
        self._clients, self._scalars = clients, scalars

    def __getitem__(self, client: str) -> Message:
        return Message(self._method.outgoing(self._server, client, self._phase), self._scalars)

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)
