"""The one verb: exchange messages with clients.

A transport only carries frames (bytes). Encoding, counting, decoding and checking happen here, once, so that every
transport sends the same bytes and refuses the same rubbish.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from wardround.federation.codecs import Codec
from wardround.federation.messages import BadMessage, Message, Schema, check, room_for
from wardround.federation.reports import checked


@dataclass(frozen=True)
class Refused:
    """A client that gave no usable answer, and why (late, died, an error of its own, a bad message)."""

    reason: str


@dataclass(frozen=True)
class Handed:
    """An answer that never became bytes, within one process and with a lossless codec, and how many it would be."""

    message: Message
    length: int


@dataclass
class Ledger:
    """Bytes per (client, direction) since it was last emptied. Directions: `down` to the client, `up` from it."""

    entries: dict[tuple[str, str], int] = field(default_factory=dict)

    def count(self, client: str, direction: str, size: int) -> None:
        """Add `size` bytes."""
        self.entries[client, direction] = self.entries.get((client, direction), 0) + size

    def take(self) -> dict[tuple[str, str], int]:
        """The entries so far, sorted, as their order in time is a matter of chance; the ledger is empty afterwards."""
        entries, self.entries = self.entries, {}
        return dict(sorted(entries.items()))


class Outbox:
    """The messages of one exchange, each made and encoded when a transport is ready to send it.

    So one frame at a time is in memory, whatever the number of clients.
    """

    def __init__(self, messages: Mapping[str, Message], codec: Codec, ledger: Ledger) -> None:
        self.clients = tuple(messages)
        self._messages, self._codec, self._ledger = messages, codec, ledger
        self._last: tuple[Message, Any] | None = None

    def frame(self, client: str) -> bytes:
        """The frame for `client`, counted as sent. Clients that share a message get the same object."""
        frame: bytes = self._prepared(client, self._codec.encode)[1]
        self._ledger.count(client, "down", len(frame))
        return frame

    def message(self, client: str) -> Message:
        """The message for `client` itself, counted as the frame that it would be; see `Handed`."""
        message, length = self._prepared(client, self._codec.length)
        self._ledger.count(client, "down", length)
        return message

    def _prepared(self, client: str, make: Callable[[Message], Any]) -> tuple[Message, Any]:
        """The message for `client` and what `make` makes of it, once for clients in a row that share the message."""
        message = self._messages[client]
        if self._last is None or self._last[0] is not message:
            self._last = (message, make(message))
        return self._last


class Transport(ABC):
    """Carries messages to clients and their replies back."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.ledger = Ledger()

    def exchange(
        self, messages: Mapping[str, Message], schema: Schema, deadline: float | None = None
    ) -> Iterator[tuple[str, Message | Refused]]:
        """Send each client its message and yield the replies in the order of `messages`.

        Args:
            messages: by client name; looked up once per client, when it is sent. A message object that stands for
                several clients is encoded once.
            schema: what the tensors of a reply must be; anything else is refused.
            deadline: seconds after which a client that has not answered is refused as late.

        Yields:
            `(client, reply)` one at a time: replies need not fit into memory together.
        """
        room = room_for(schema)
        for client, answer in self.carry(Outbox(messages, self.codec, self.ledger), deadline):
            yield client, self._open(client, answer, schema, room)

    def _open(self, client: str, answer: bytes | Handed | Refused, schema: Schema, room: int) -> Message | Refused:
        if isinstance(answer, Refused):
            return answer
        self.ledger.count(client, "up", answer.length if isinstance(answer, Handed) else len(answer))
        try:
            message = answer.message if isinstance(answer, Handed) else self.codec.decode(answer, room)
            check(message, schema)
            return checked(message)
        except BadMessage as bad:
            return Refused(str(bad))

    @abstractmethod
    def carry(self, outbox: Outbox, deadline: float | None) -> Iterator[tuple[str, bytes | Handed | Refused]]:
        """Deliver `outbox.frame(client)` to each of `outbox.clients`; yield `(client, answer)` in their order."""

    def close(self) -> None:  # noqa: B027 - a transport without resources need not override it
        """Release processes and connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
