"""What wants to know how a run goes: recorders, progress bars, tests that pull the plug."""

from __future__ import annotations

from collections.abc import Sequence

from wardround.federation.messages import Message
from wardround.federation.server import Server
from wardround.federation.transport import Refused


class Observer:
    """Told of every event of the round loop; does nothing. Override what you need."""

    def round_started(self, round: int, clients: Sequence[str]) -> None:
        """A round begins with these clients."""

    def answered(self, round: int, phase: str, client: str, answer: Message | Refused) -> None:
        """A client has answered, or its answer was refused."""

    def combining(self, round: int, phase: str) -> None:
        """All answers are in; the server's new state is about to be set."""

    def round_ended(self, round: int, server: Server) -> None:
        """The server's state is that of the end of `round`."""

    def traffic(self, round: int, phase: str, entries: dict[tuple[str, str], int]) -> None:
        """Bytes by (client, direction) in one phase."""

    def checkpointing(self, round: int) -> None:
        """The server's part of a checkpoint is about to be written."""

    def checkpointed(self, round: int) -> None:
        """The checkpoint of `round` is whole."""
