"""The only round loop there is. It knows no method by name and no transport by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from wardround import seeds
from wardround.errors import RunError
from wardround.federation.checkpoints import Checkpoints
from wardround.federation.messages import Message
from wardround.federation.observers import Observer
from wardround.federation.server import IndividualMessages, Reply, Server, ServerHalf
from wardround.federation.transport import Refused, Transport
from wardround.options import Options

TRAIN, EVALUATE = "train", "evaluate"


class RoundOptions(Options):
    """The `[federation]` section: who takes part, what counts as a round, when to evaluate and to save."""

    participation: float = Field(1.0, gt=0, le=1, description="share of the clients drawn for each round")
    quorum: float = Field(0.5, gt=0, le=1, description="share of a round's clients that must give a usable answer")
    deadline: float | None = Field(None, gt=0, description="seconds until a client that has not answered is late")
    evaluate_every: int = Field(1, ge=1, description="evaluate in every n-th round, and always in the last")
    evaluate_server: bool = Field(True, description="evaluate the server's model too, not the personal ones alone")
    checkpoint_every: int = Field(1, ge=1, description="save in every n-th round, and always in the last")


@dataclass
class RoundLoop:
    """Runs a method's rounds over a transport.

    Attributes:
        method: the server half.
        server: where the run stands; `server.round` is the last complete round.
        transport: carries the messages.
        clients: all client names, in the order in which replies are combined.
        rounds: how many rounds the run has.
        options: see `RoundOptions`.
        seed: for drawing participants.
        checkpoints: None to save nothing.
        observers: told of every event.
        best: the saved round with the best mean validation score so far, and that score.
    """

    method: ServerHalf
    server: Server
    transport: Transport
    clients: Sequence[str]
    rounds: int
    options: RoundOptions
    seed: int
    checkpoints: Checkpoints | None = None
    observers: Sequence[Observer] = ()
    best: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        """Tell the server who the clients are, and the seed."""
        self.server.clients, self.server.names, self.server.seed = len(self.clients), tuple(self.clients), self.seed

    def run(self) -> None:
        """Do the rounds that are left, then evaluate the server's final model at every client.

        Raises:
            RunError: a round lost its quorum, a worker died or a checkpoint could not be written.
        """
        self.server.rounds = self.rounds
        while self.server.round < self.rounds:
            self._round(self.server.round + 1)
        if self.options.evaluate_server:
            self._evaluate_server()

    def participants(self, round: int) -> list[str]:
        """The clients of `round`, drawn without replacement, in their fixed order."""
        size = max(1, math.floor(self.options.participation * len(self.clients) + 0.5))
        stream = seeds.numpy_stream(self.seed, "participation", round)
        chosen = sorted(stream.choice(len(self.clients), size=size, replace=False))
        return [self.clients[i] for i in chosen]

    def evaluates(self, round: int) -> bool:
        """Whether the models of `round` are evaluated."""
        return round == self.rounds or (round > 0 and round % self.options.evaluate_every == 0)

    def _round(self, round: int) -> None:
        clients = self.participants(round)
        self.server.log = {}
        self._tell("round_started", round, clients)
        scores: list[float] = []
        closing = self.method.closing_phases() if round == self.rounds else ()
        for number, phase in enumerate((*self.method.phases(round), *closing)):
            scalars = self._instructions(round, phase) | {"exchange": number}
            replies = self._exchange(round, phase, clients, scalars, scores)
            self.method.combine(self.server, phase, replies)
            for _ in replies:  # a method may have seen enough; the quorum and the traffic are of all
                pass
        self.server.round = round
        self._consider(round, scores)
        self._tell("round_ended", round, self.server)
        self._save(round)

    def _consider(self, round: int, scores: Sequence[float]) -> None:
        """Note the best of the rounds whose checkpoint can be kept."""
        if not scores or not self._due(round):
            return
        mean = sum(scores) / len(scores)
        if self.best is None or mean > self.best[1]:
            self.best = (round, mean)

    def _instructions(self, round: int, phase: str) -> dict[str, Any]:
        """The scalars that tell a client what to do beside the method's own work.

        Models are evaluated and clients' states saved with the phase in which they train.
        """
        trains = phase == TRAIN
        return {
            "round": round,
            "phase": phase,
            "evaluate_received": self.options.evaluate_server and trains and self.evaluates(round - 1),
            "evaluate_personal": trains and self.evaluates(round),
            "checkpoint": trains and self._keeps(round),
            "checkpoint_round": self._next_due(round),
            "resumable": self.checkpoints.oldest_kept() if self.checkpoints else 0,
            "final": trains and round == self.rounds,
        }

    def _exchange(
        self, round: int, phase: str, clients: Sequence[str], scalars: Mapping[str, Any], scores: list[float]
    ) -> Iterator[Reply]:
        """Send, and yield the usable replies; the quorum is checked before the last one has been folded in."""
        usable = 0
        reasons = []
        messages = self._messages(phase, clients, scalars)
        schema = self.method.reply_schema(phase)
        for client, answer in self.transport.exchange(messages, schema, self.options.deadline):
            self._tell("answered", round, phase, client, answer)
            if isinstance(answer, Refused):
                reasons.append(f"{client}: {answer.reason}")
                continue
            usable += 1
            scores.extend(_validation_score(answer))
            yield Reply(client, answer)
        self._tell("traffic", round, phase, self.transport.ledger.take())
        needed = math.ceil(self.options.quorum * len(clients) - 1e-9)  # 0.55 * 100 is 55.000000000000007
        if usable < needed:
            raise RunError(
                f"round {round}: {usable} of {len(clients)} clients gave a usable answer, the quorum is {needed}. "
                + "; ".join(reasons)
            )
        self._tell("combining", round, phase)

    def _messages(self, phase: str, clients: Sequence[str], scalars: Mapping[str, Any]) -> Mapping[str, Message]:
        if self.method.individual:
            return IndividualMessages(self.method, self.server, phase, clients, scalars)
        return dict.fromkeys(clients, Message(self.method.outgoing(self.server, "", phase), scalars))

    def _evaluate_server(self) -> None:
        scalars = {"round": self.server.round, "phase": EVALUATE, "evaluate_received": True, "final": True}
        messages = self._messages(EVALUATE, self.clients, scalars)
        for client, answer in self.transport.exchange(messages, {}, self.options.deadline):
            self._tell("answered", self.server.round, EVALUATE, client, answer)
        self._tell("traffic", self.server.round, EVALUATE, self.transport.ledger.take())

    def _due(self, round: int) -> bool:
        return round == self.rounds or round % self.options.checkpoint_every == 0

    def _next_due(self, round: int) -> int:
        """The round of the next checkpoint: `round` itself where it has one."""
        every = self.options.checkpoint_every
        return min(self.rounds, -(-round // every) * every)

    def _keeps(self, round: int) -> bool:
        """Whether clients save what they have: for this round's checkpoint, or because the round of the next one
        may be without them.
        """
        return self.checkpoints is not None and (self._due(round) or self.options.participation < 1)

    def _saves(self, round: int) -> bool:
        return self.checkpoints is not None and self._due(round)

    def _save(self, round: int) -> None:
        if self.checkpoints is not None and self._saves(round):
            self._tell("checkpointing", round)
            best, score = self.best or (None, None)
            self.checkpoints.commit(self.server, self.clients, best=best, best_score=score)
            self._tell("checkpointed", round)

    def _tell(
        self,
        event: Literal[
            "round_started",
            "answered",
            "combining",
            "round_ended",
            "traffic",
            "checkpointing",
            "checkpointed",
        ],
        *details: Any,
    ) -> None:
        for observer in self.observers:
            getattr(observer, event)(*details)


def _validation_score(answer: Message) -> list[float]:
    """The personal model's balanced accuracy on validation images, if there are any: it picks the best round."""
    personal = answer.scalars["personal"]
    score = personal["val"]["balanced_accuracy"] if personal else None
    return [] if score is None else [score]
