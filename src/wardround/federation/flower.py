"""Messages carried by Flower: the server's transport, and the envelope that both sides know.

Flower delivers; what is delivered are this package's frames. So codecs, checks and byte counts are those of every
other transport, and Flower sees names of clients and sealed bytes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from wardround.errors import RunError
from wardround.federation.codecs import Codec
from wardround.federation.messages import shorten
from wardround.federation.transport import Outbox, Refused, Transport
from wardround.federation.workers import Answerer, answer_or_reason

RECORD = "wardround"
ANSWER, ROLL_CALL = "query.answer", "query.roll_call"
ATTEMPTS = 3  # how often a message is sent at most, where it is lost with its node


@dataclass(frozen=True)
class Envelope:
    """What travels around a frame.

    Attributes:
        client: whom it is for, or from.
        experiment: a hash of all that decides the numbers; both sides must mean the same.
        ticket: a word of the server's that a reply must bring back, so that no other reply passes for it.
        frame: an encoded message; empty in a roll call and where an answer is refused.
        refusal: why there is no answer.
    """

    client: str = ""
    experiment: str = ""
    ticket: str = ""
    frame: bytes = b""
    refusal: str = ""

    def sealed(self) -> RecordDict:
        """As Flower carries it."""
        return RecordDict({RECORD: ConfigRecord(dict(self.__dict__))})

    @classmethod
    def opened(cls, content: RecordDict) -> Envelope:
        """What `sealed` made; anything else is an envelope that says so."""
        record = content.config_records.get(RECORD)
        fields = dict(record) if record is not None else {}
        kinds = {name: type(value) for name, value in cls().__dict__.items()}
        if fields.keys() != kinds.keys() or any(not isinstance(fields[name], kinds[name]) for name in kinds):
            return cls(refusal="not a message of this package")
        return cls(**fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Correspondent:
    """A client as a writer of envelopes.

    Attributes:
        client: its name.
        experiment: the digest of what it means.
    """

    client: str
    experiment: str

    def reply(self, asked: Envelope, frame: bytes = b"") -> Envelope:
        """An answer to `asked`."""
        return Envelope(self.client, self.experiment, asked.ticket, frame)

    def refuse(self, asked: Envelope, why: str) -> Envelope:
        """No answer to `asked`, and why."""
        return Envelope(self.client, self.experiment, asked.ticket, refusal=shorten(why, 1000))

    def other_experiment(self, asked: Envelope) -> str:
        """What is wrong where the server means another experiment; else empty."""
        if asked.experiment == self.experiment:
            return ""
        there, here = shorten(asked.experiment[:12]), self.experiment[:12]
        return f"the server's experiment is another one (digest {there}, here {here})"

    def answer(self, asked: Envelope, answerer: Answerer) -> Envelope:
        """What `answerer` says to a message that is for this client, or why nothing is said.

        Raises:
            OSError: the disk is full or fails.
        """
        wrong = self.other_experiment(asked)
        if not wrong and asked.client != self.client:
            wrong = f"this is {self.client!r}, the message is for {shorten(asked.client)!r}"
        answer = Refused(wrong) if wrong else answer_or_reason(answerer, self.client, asked.frame)
        return self.refuse(asked, answer.reason) if isinstance(answer, Refused) else self.reply(asked, answer)


@dataclass
class Exchange:
    """One exchange in progress.

    Attributes:
        ticket: that of this exchange.
        end: when the deadline passes, in the seconds of the monotonic clock.
        sent: client by Flower's name for the message that it has not answered yet.
        absent: clients that are waited for.
        attempts: how often each client was asked.
        answers: answers that wait for their turn.
    """

    ticket: str
    end: float | None
    sent: dict[str, str] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    attempts: dict[str, int] = field(default_factory=dict)
    answers: dict[str, bytes | Refused] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return self.end is not None and time.monotonic() >= self.end


class FlowerTransport(Transport):
    """Clients are ClientApps that Flower reaches, in its simulation or at its SuperNodes.

    Args:
        codec: how messages become bytes.
        grid: Flower's.
        clients: the names of all clients.
        experiment: the digest that clients must have as well.

    Attributes:
        pauses: seconds between two looks for replies: at first, and at most.
    """

    pauses = (0.01, 1.0)

    def __init__(self, codec: Codec, grid: Grid, clients: Sequence[str], experiment: str) -> None:
        super().__init__(codec)
        self.grid, self.clients, self.experiment = grid, tuple(clients), experiment
        self.nodes: dict[str, int] = {}
        self._asked: dict[str, tuple[int, str]] = {}  # questions for names: by Flower's name, the node and the ticket

    def call_roll(self, seconds: float | None = None) -> None:
        """Ask every node which client it is, until all are known.

        Raises:
            RunError: not all answered within `seconds`, two nodes claim one name, or a node has another experiment.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while self._absent():
            self._ask_names(5.0)
            if end is not None and time.monotonic() >= end and self._absent():
                nodes, absent = len(list(self.grid.get_node_ids())), ", ".join(self._absent())
                raise RunError(
                    f"no answer from {absent} within {seconds:g} s; {nodes} nodes are connected, the experiment has "
                    f"{len(self.clients)} clients"
                )

    def carry(self, outbox: Outbox, deadline: float | None) -> Iterator[tuple[str, bytes | Refused]]:
        """Send every frame at once; hand the answers on in the order of the clients."""
        end = None if deadline is None else time.monotonic() + deadline
        exchange = Exchange(secrets.token_hex(16), end)
        for client in outbox.clients:
            self._send(exchange, client, outbox)
        for client in outbox.clients:
            pause = self.pauses[0]
            while client not in exchange.answers:
                if not self._collect(exchange, outbox):
                    time.sleep(pause)
                    pause = min(2 * pause, self.pauses[1])
                if exchange.over:
                    for late in (*exchange.sent.values(), *exchange.absent):
                        exchange.answers.setdefault(late, Refused("late: no answer before the deadline"))
            yield client, exchange.answers.pop(client)
        self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        """All answers have been handed on."""

    def _send(self, exchange: Exchange, client: str, outbox: Outbox) -> None:
        """Ask a client, for the first time or again."""
        exchange.attempts[client] = exchange.attempts.get(client, 0) + 1
        envelope = Envelope(client, self.experiment, exchange.ticket, outbox.frame(client))
        identifiers = self._push(envelope, [self.nodes[client]], ANSWER) if client in self.nodes else []
        if identifiers:
            exchange.sent[identifiers[0]] = client
        else:
            self._miss(exchange, client)

    def _miss(self, exchange: Exchange, client: str) -> None:
        """A client cannot be reached now."""
        exchange.answers[client] = Refused("not connected")

    def _push(self, envelope: Envelope, nodes: Iterable[int], kind: str) -> list[str]:
        content = envelope.sealed()
        messages = [Message(content=content, dst_node_id=node, message_type=kind) for node in nodes]
        return list(self.grid.push_messages(messages))

    def _collect(self, exchange: Exchange, outbox: Outbox) -> bool:
        """Take in the replies that have come; False where there was none."""
        replies = list(self.grid.pull_messages(list(exchange.sent)))
        for reply in replies:
            client = exchange.sent.pop(reply.metadata.reply_to_message_id)
            if reply.has_error() and exchange.attempts[client] < ATTEMPTS and not exchange.over:
                self._lose(exchange, client, outbox)
            else:
                exchange.answers[client] = self._opened(reply, client, exchange.ticket)
        return bool(replies)

    def _lose(self, exchange: Exchange, client: str, outbox: Outbox) -> None:
        """A message was lost with its node, which may have come back as another one."""
        self._ask_names(5.0)
        self._send(exchange, client, outbox)

    def _opened(self, reply: Message, client: str, ticket: str) -> bytes | Refused:
        if reply.has_error():
            return Refused(f"Flower: {shorten(str(reply.error.reason))} (code {reply.error.code})")
        envelope = Envelope.opened(reply.content)
        if envelope.refusal:
            return Refused(shorten(envelope.refusal, 1000))
        if (envelope.client, envelope.ticket) != (client, ticket):
            return Refused(f"a reply of {shorten(envelope.client)!r} to another message: replayed, or mixed up")
        return envelope.frame

    # ---- who is where

    def _absent(self) -> list[str]:
        return [client for client in self.clients if client not in self.nodes]

    def _ask_names(self, seconds: float) -> None:
        """Ask the nodes that are not known, and note what they answer within `seconds`, or answer a later time.

        A node may take long: Flower's own starts a process for every message.
        """
        end, connected = time.monotonic() + seconds, set(self.grid.get_node_ids())
        self.nodes = {client: node for client, node in self.nodes.items() if node in connected}
        self._asked = {name: one for name, one in self._asked.items() if one[0] in connected}
        strangers = connected - set(self.nodes.values()) - {node for node, _ in self._asked.values()}
        for node in sorted(strangers):
            ticket = secrets.token_hex(16)
            envelope = Envelope(experiment=self.experiment, ticket=ticket)
            self._asked |= dict.fromkeys(self._push(envelope, [node], ROLL_CALL), (node, ticket))
        while time.monotonic() < end and self._absent() and self._asked:
            for reply in self.grid.pull_messages(list(self._asked)):
                self._note(reply, self._asked.pop(reply.metadata.reply_to_message_id)[1])
            time.sleep(0.05)
        if not connected:
            time.sleep(0.2)

    def _note(self, reply: Message, ticket: str) -> None:
        """Enter a node into the list, or say why not."""
        if reply.has_error():
            return
        envelope = Envelope.opened(reply.content)
        if envelope.refusal:
            raise RunError(f"{shorten(envelope.client) or 'a node'} does not take part: {shorten(envelope.refusal)}")
        if envelope.ticket != ticket or envelope.client not in self.clients:
            raise RunError(f"a node calls itself {shorten(envelope.client)!r} (expected: {', '.join(self.clients)})")
        node = reply.metadata.src_node_id
        if self.nodes.setdefault(envelope.client, node) != node:
            raise RunError(f"two nodes call themselves {envelope.client!r}")
