"""The embedded transport: clients run in this process, or in worker processes of this machine.

Each client belongs to one worker for the whole run, so its local state and cached features stay there. What a
client computes depends on its messages and its key of the random streams alone, hence any number of workers gives
the same bits.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext

from wardround.federation.codecs import Codec
from wardround.federation.transport import Handed, Outbox, Refused, Transport
from wardround.federation.workers import Answerer, HandsOver, Worker, answer_or_reason, result_or_reason

# Bytes of answers that may wait for their turn. Answers are handed on in a fixed order; workers that are far ahead
# of it pause, so that memory does not grow with the number of clients.
WAITING_ROOM = 64 * 2**20
CLOSING_SECONDS = 2.0


class InProcess(Transport):
    """All clients one after the other in this process.

    With a lossless codec messages are handed over as they are, and counted as the frames that they would be: making
    bytes of them and checking those would cost a small network a seventh of its round.

    Args:
        codec: how messages become bytes.
        answerer: the client half.
        hand_over: whether messages may be handed over; False makes frames of all of them.
    """

    def __init__(self, codec: Codec, answerer: Answerer, hand_over: bool = True) -> None:
        super().__init__(codec)
        self.answerer = answerer
        self.hands_over = hand_over and codec.lossless and isinstance(answerer, HandsOver)

    def carry(self, outbox: Outbox, deadline: float | None) -> Iterator[tuple[str, bytes | Handed | Refused]]:
        """Answer for each client in turn. A deadline counts each client's own time."""
        for client in outbox.clients:
            ask = self._handed(client, outbox) if self.hands_over else self._framed(client, outbox)
            started = time.monotonic()
            answer = ask()
            late = deadline is not None and time.monotonic() - started > deadline
            yield client, Refused(f"late: no answer within {deadline:g} s") if late else answer

    def _framed(self, client: str, outbox: Outbox) -> Callable[[], bytes | Refused]:
        return functools.partial(answer_or_reason, self.answerer, client, outbox.frame(client))

    def _handed(self, client: str, outbox: Outbox) -> Callable[[], Handed | Refused]:
        message = outbox.message(client)

        def answer() -> Handed:
            reply = self.answerer.hand(client, message)  # type: ignore[attr-defined]
            return Handed(reply, self.codec.length(reply))

        return functools.partial(result_or_reason, answer)


@dataclass
class _Exchange:
    """One exchange in progress.

    Attributes:
        number: counts exchanges, so that an answer to an earlier one is known as such.
        outbox: the frames to send.
        end: when the deadline passes, in the seconds of the monotonic clock.
        queues: for each worker the clients that it has yet to answer for.
        awaited: the client whose answer is to be handed on next.
        answers: answers that wait for their turn.
    """

    number: int
    outbox: Outbox
    end: float | None
    queues: list[deque[str]]
    awaited: str = ""
    answers: dict[str, bytes | Refused] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float | None:
        """Until the deadline; 0 after it."""
        return None if self.end is None else max(0.0, self.end - time.monotonic())

    def may_begin(self, client: str) -> bool:
        """Whether `client` may be asked now: there is time, and its answer would find room."""
        waiting = sum(len(answer) for answer in self.answers.values() if isinstance(answer, bytes))
        return self.seconds_left != 0 and (client == self.awaited or waiting < WAITING_ROOM)


class WorkerProcesses(Transport):
    """Clients spread over worker processes.

    Args:
        codec: how messages become bytes.
        make_answerer: called once in each worker. Workers are forked where that is safe, so that they share this
            process's images; elsewhere it must be picklable.
        load: examples per client; decides which worker a client belongs to.
        workers: how many processes.
    """

    def __init__(
        self, codec: Codec, make_answerer: Callable[[], Answerer], load: Mapping[str, int], workers: int
    ) -> None:
        super().__init__(codec)
        context = process_context()
        self._workers: list[Worker] = []
        for _ in range(workers):
            self._workers.append(Worker(context, make_answerer, self._workers))
        self._home = _spread(load, workers)
        self._exchanges = 0
        self._tasks: dict[int, tuple[int, str]] = {}  # worker -> (exchange, client) that it works on

    def carry(self, outbox: Outbox, deadline: float | None) -> Iterator[tuple[str, bytes | Refused]]:
        """Keep every worker busy; hand the answers on in the order of the clients."""
        exchange = self._begin(outbox, deadline)
        for client in outbox.clients:
            exchange.awaited = client
            self._hand_out(exchange)
            while client not in exchange.answers:
                self._collect(exchange)
                self._hand_out(exchange)  # before the answer is handed on: workers go on while it is dealt with
            yield client, exchange.answers.pop(client)

    def _begin(self, outbox: Outbox, deadline: float | None) -> _Exchange:
        self._exchanges += 1
        queues: list[deque[str]] = [deque() for _ in self._workers]
        for client in outbox.clients:
            queues[self._home[client]].append(client)
        end = None if deadline is None else time.monotonic() + deadline
        return _Exchange(self._exchanges, outbox, end, queues)

    def _hand_out(self, exchange: _Exchange) -> None:
        """Give idle workers work."""
        for number, (worker, queue) in enumerate(zip(self._workers, exchange.queues, strict=True)):
            if number not in self._tasks and queue and exchange.may_begin(queue[0]):
                client = queue.popleft()
                worker.send(client, exchange.outbox.frame(client))
                self._tasks[number] = (exchange.number, client)

    def _collect(self, exchange: _Exchange) -> None:
        """Wait for the next answers or the deadline."""
        busy = {self._workers[number].pipe: number for number in self._tasks}
        for pipe in wait(list(busy), timeout=exchange.seconds_left):
            number = busy[pipe]  # type: ignore[index]
            asked, client = self._tasks[number]
            answer = self._workers[number].receive(client)
            del self._tasks[number]
            if asked == exchange.number:  # else it belongs to an exchange that has moved on without it
                exchange.answers[client] = answer
        if exchange.seconds_left == 0:
            self._refuse_late(exchange)

    def _refuse_late(self, exchange: _Exchange) -> None:
        waiting = [client for queue in exchange.queues for client in queue]
        waiting += [client for asked, client in self._tasks.values() if asked == exchange.number]
        for client in waiting:
            exchange.answers[client] = Refused("late: no answer before the deadline")

    def close(self) -> None:
        """End the workers; one that is still computing is killed."""
        end = time.monotonic() + CLOSING_SECONDS
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            worker.end(patience=end - time.monotonic())


def process_context() -> BaseContext:
    """Fork on Linux while no GPU is in use (shares memory, starts at once); a fresh interpreter elsewhere."""
    import torch

    forkable = sys.platform == "linux" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return multiprocessing.get_context("fork" if forkable else "spawn")


def _spread(load: Mapping[str, int], workers: int) -> dict[str, int]:
    """Give each client, in order, to the worker with the least to do so far. Answers then come nearly in order."""
    totals = [0] * workers
    home = {}
    for client, examples in load.items():
        least = totals.index(min(totals))
        home[client] = least
        totals[least] += examples + 1
    return home
