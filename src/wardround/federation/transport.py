"""The one verb: exchange messages with clients.

A transport only carries frames (bytes). Encoding, counting, decoding and checking happen here, once, so that every
transport sends the same bytes and refuses the same rubbish.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

from wardround.federation.codecs import Codec
from wardround.federation.messages import BadMessage, Message, Schema, check, examples_of


@dataclass(frozen=True)
class Refused:
    """A client that gave no usable answer, and why (late, died, an error of its own, a bad message)."""

    reason: str


@dataclass
class Ledger:
    """Bytes per (client, direction) since it was last emptied. Directions: `down` to the client, `up` from it."""

    entries: dict[tuple[str, str], int] = field(default_factory=dict)

    def count(self, client: str, direction: str, size: int) -> None:
        """Add `size` bytes."""
        self.entries[client, direction] = self.entries.get((client, direction), 0) + size

    def take(self) -> dict[tuple[str, str], int]:
        """The entries so far; the ledger is empty afterwards."""
        entries, self.entries = self.entries, {}
        return entries


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
            messages: by client name. A message object that stands for several clients is encoded once.
            schema: what the tensors of a reply must be; anything else is refused.
            deadline: seconds after which a client that has not answered is refused as late.

        Yields:
            `(client, reply)` one at a time: replies need not fit into memory together.
        """
        frames: dict[int, bytes] = {}
        payloads = {}
        for client, message in messages.items():
            frame = frames.get(id(message))
            if frame is None:
                frame = frames[id(message)] = self.codec.encode(message)
            payloads[client] = frame
            self.ledger.count(client, "down", len(frame))
        for client, answer in self.carry(payloads, deadline):
            yield client, self._open(client, answer, schema)

    def _open(self, client: str, answer: bytes | Refused, schema: Schema) -> Message | Refused:
        if isinstance(answer, Refused):
            return answer
        self.ledger.count(client, "up", len(answer))
        try:
            message = self.codec.decode(answer)
            check(message, schema)
            examples_of(message)
        except BadMessage as bad:
            return Refused(str(bad))
        return message

    @abstractmethod
    def carry(self, payloads: Mapping[str, bytes], deadline: float | None) -> Iterator[tuple[str, bytes | Refused]]:
        """Deliver each frame and yield `(client, answer)` in the order of `payloads`."""

    def close(self) -> None:  # noqa: B027 - a transport without resources need not override it
        """Release processes and connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
