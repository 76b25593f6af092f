"""The server's transport to real hospitals: it waits for who is away, and lets in who means the same."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from flwr.app import Message

from wardround.deploy.joining import Joining, opened
from wardround.deploy.superlink import LinkGrid
from wardround.federation.codecs import Codec
from wardround.federation.flower import ATTEMPTS, ROLL_CALL, Envelope, Exchange, FlowerTransport
from wardround.federation.messages import shorten
from wardround.federation.transport import Outbox, Refused

FAREWELL = "query.farewell"
REMIND_SECONDS = 60.0  # between two lines that say who is waited for


@dataclass
class Roll:
    """Who has said that it means the same.

    Attributes:
        said: what each client said of itself, once it was let in.
        starts: which process of it that was.
        asked: Flower's names for questions that are not answered yet, each with client and process.
        refused: clients that were refused, with the process that was.
    """

    said: dict[str, Joining] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    asked: dict[str, tuple[str, int]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)


class HospitalTransport(FlowerTransport):
    """Clients are processes at hospitals, which come and go.

    Args:
        codec: how messages become bytes.
        grid: Flower's, over the state in this process.
        clients: the names of all clients.
        digest: of the agreement.
        objection: why a client's word keeps it out; None where it does not.
        tell: takes a sentence about who comes, goes and is waited for.
    """

    pauses = (0.01, 0.1)  # the replies are in this process

    def __init__(
        self,
        codec: Codec,
        grid: LinkGrid,
        clients: tuple[str, ...],
        digest: str,
        objection: Callable[[Joining], str | None],
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(codec, grid, clients, digest)
        self.link, self.roll = grid, Roll()
        self._objection, self._tell = objection, tell
        self._sent_to: dict[str, int] = {}  # client -> the process of it that has the message in progress
        self._reminded = time.monotonic()

    def call_roll(self, seconds: float | None = None) -> None:
        """Wait until every client has joined."""
        while self._absent():
            self.refresh()
            self._remind(self._absent())
            time.sleep(0.1)

    def carry(self, outbox: Outbox, deadline: float | None) -> Iterator[tuple[str, bytes | Refused]]:
        """Send every frame when its client is there; hand the answers on in the order of the clients."""
        self.refresh()
        yield from super().carry(outbox, deadline)

    def _end(self, exchange: Exchange) -> None:
        """Nobody waits any more for what is late."""
        self.link.forget(exchange.sent)

    def say_farewell(self, seconds: float = 10.0) -> None:
        """Tell whoever is connected that all is done, and wait a little for them to have heard it."""
        self.refresh()
        envelope = Envelope(experiment=self.experiment, ticket=secrets.token_hex(16))
        waiting = set(self._push(envelope, self.nodes.values(), FAREWELL)) if self.nodes else set[str]()
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            waiting -= {reply.metadata.reply_to_message_id for reply in self.grid.pull_messages(list(waiting))}
            time.sleep(0.1)

    # ---- who is there

    def refresh(self) -> None:
        """See who is connected, and let in those who have come."""
        connected = self.link.connected()
        for client, node in connected.items():
            start = self.link.starts(client)
            known = start in (self.roll.starts.get(client), self.roll.refused.get(client))
            if not known and (client, start) not in self.roll.asked.values():
                envelope = Envelope(client, self.experiment, secrets.token_hex(16))
                for name in self._push(envelope, [node], ROLL_CALL):
                    self.roll.asked[name] = (client, start)
        if self.roll.asked:
            for reply in self.grid.pull_messages(list(self.roll.asked)):
                self._hear(reply, *self.roll.asked.pop(reply.metadata.reply_to_message_id))
        self.nodes = {
            client: node
            for client, node in connected.items()
            if self.roll.starts.get(client) == self.link.starts(client)
        }

    def _hear(self, reply: Message, client: str, start: int) -> None:
        """Let a client in, or say why not."""
        if reply.has_error() or start != self.link.starts(client):
            return
        envelope = Envelope.opened(reply.content)
        said = opened(envelope.frame) if not envelope.refusal else shorten(envelope.refusal)
        wrong = said if isinstance(said, str) else self._objection(said)
        if wrong is None and envelope.client != client:
            wrong = f"it has the key of {client!r}, but calls itself {shorten(envelope.client)!r}"
        if wrong is not None or isinstance(said, str):
            self.roll.refused[client] = start
            self._tell(f"refused {client}: {wrong}")
            if not envelope.refusal:
                farewell = Envelope(client, self.experiment, secrets.token_hex(16), refusal=wrong or "")
                self._push(farewell, [reply.metadata.src_node_id], FAREWELL)
            return
        self._tell(f"{client} {'is back' if client in self.roll.said else 'has joined'}")
        self.roll.said[client], self.roll.starts[client] = said, start

    # ---- who is away

    def _send(self, exchange: Exchange, client: str, outbox: Outbox) -> None:
        self._sent_to[client] = self.link.starts(client)
        exchange.absent.discard(client)
        super()._send(exchange, client, outbox)

    def _miss(self, exchange: Exchange, client: str) -> None:
        exchange.absent.add(client)
        exchange.attempts[client] -= 1  # nothing was sent

    def _lose(self, exchange: Exchange, client: str, outbox: Outbox) -> None:
        exchange.absent.add(client)

    def _collect(self, exchange: Exchange, outbox: Outbox) -> bool:
        """As ever; and send to those who have come back."""
        found = super()._collect(exchange, outbox)
        self.refresh()
        for name, client in list(exchange.sent.items()):
            if self._sent_to[client] != self.link.starts(client):
                self.link.forget([name])
                del exchange.sent[name]
                self._give_up_or_wait(exchange, client)
        for client in [client for client in exchange.absent if client in self.nodes]:
            self._send(exchange, client, outbox)
        self._remind(sorted(exchange.absent))
        return found

    def _give_up_or_wait(self, exchange: Exchange, client: str) -> None:
        """A client has started anew while it had a message."""
        if exchange.attempts[client] < ATTEMPTS:
            exchange.absent.add(client)
        else:
            exchange.answers[client] = Refused(f"ended {ATTEMPTS} times before it had answered")

    def _remind(self, clients: list[str]) -> None:
        if clients and time.monotonic() - self._reminded >= REMIND_SECONDS:
            self._reminded = time.monotonic()
            self._tell(f"waiting for {', '.join(clients)}")
