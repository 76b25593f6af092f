"""The embedded transport: clients run in this process, or in worker processes of this machine.

Each client belongs to one worker for the whole run, so its local state and cached features stay there. What a
client computes depends on its messages and its key of the random streams alone, hence any number of workers gives
the same bits.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Protocol

from wardround.errors import RunError
from wardround.federation.codecs import Codec
from wardround.federation.transport import Refused, Transport


class Answerer(Protocol):
    """The client half of a federation: whatever answers a frame for a client."""

    def answer(self, client: str, frame: bytes) -> bytes:
        """The reply's frame."""


class InProcess(Transport):
    """All clients one after the other in this process."""

    def __init__(self, codec: Codec, answerer: Answerer) -> None:
        super().__init__(codec)
        self.answerer = answerer

    def carry(self, payloads: Mapping[str, bytes], deadline: float | None) -> Iterator[tuple[str, bytes | Refused]]:
        """Answer for each client in turn. A deadline counts each client's own time."""
        for client, frame in payloads.items():
            start = time.monotonic()
            answer = _guarded(self.answerer, client, frame)
            late = deadline is not None and time.monotonic() - start > deadline
            yield client, Refused(f"late: no answer within {deadline:g} s") if late else answer


def _guarded(answerer: Answerer, client: str, frame: bytes) -> bytes | Refused:
    """An error inside one client must not stop the others."""
    try:
        return answerer.answer(client, frame)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Refused(f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})")


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    queue: list[str] = field(default_factory=list)
    busy: tuple[int, str] | None = None  # (exchange, client) that it works on
    frame: bytes | None = None  # the frame that it holds, so that a broadcast is sent to it once


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
        self._exchange = 0
        self._workers: list[_Worker] = []
        for _ in range(workers):
            self._workers.append(_start(context, make_answerer, [w.pipe for w in self._workers]))
        self._home = _spread(load, workers)

    def carry(self, payloads: Mapping[str, bytes], deadline: float | None) -> Iterator[tuple[str, bytes | Refused]]:
        """Keep every worker busy; hand the answers on in the order of `payloads`."""
        self._exchange += 1
        for worker in self._workers:
            worker.queue.clear()
        for client in payloads:
            self._workers[self._home[client]].queue.append(client)
        end = None if deadline is None else time.monotonic() + deadline
        answers: dict[str, bytes | Refused] = {}
        for client in payloads:
            while client not in answers:
                self._advance(payloads, answers, end)
            yield client, answers.pop(client)

    def _advance(self, payloads: Mapping[str, bytes], answers: dict[str, bytes | Refused], end: float | None) -> None:
        """Give idle workers work, then wait for the next answer or the deadline."""
        for worker in self._workers:
            if worker.busy is None and worker.queue:
                self._send(worker, payloads)
        busy = {worker.pipe: worker for worker in self._workers if worker.busy}
        left = None if end is None else max(0.0, end - time.monotonic())
        ready = wait(list(busy), timeout=left)
        for pipe in ready:
            worker = busy[pipe]  # type: ignore[index]
            exchange, client = worker.busy or (0, "")
            answer = _receive(worker)
            worker.busy = None
            if exchange == self._exchange:  # else it belongs to a round that has moved on without it
                answers[client] = answer
        if not ready and left is not None:
            self._refuse_late(payloads, answers)

    def _send(self, worker: _Worker, payloads: Mapping[str, bytes]) -> None:
        client = worker.queue.pop(0)
        frame = payloads[client]
        repeated = worker.frame is frame
        worker.pipe.send((client, None if repeated else len(frame)))
        if not repeated:
            worker.pipe.send_bytes(frame)
        worker.frame, worker.busy = frame, (self._exchange, client)

    def _refuse_late(self, payloads: Mapping[str, bytes], answers: dict[str, bytes | Refused]) -> None:
        waiting = {client for worker in self._workers for client in worker.queue}
        waiting |= {w.busy[1] for w in self._workers if w.busy and w.busy[0] == self._exchange}
        for client in waiting:
            answers[client] = Refused("late: no answer before the deadline")
        for worker in self._workers:
            worker.queue.clear()

    def close(self) -> None:
        """End the workers; one that is still computing is killed."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.pipe.close()
        for worker in self._workers:
            worker.process.join(timeout=2)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def process_context() -> BaseContext:
    """Fork on Linux while no GPU is in use (shares memory, starts at once); a fresh interpreter elsewhere."""
    import torch

    forkable = sys.platform == "linux" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return multiprocessing.get_context("fork" if forkable else "spawn")


def _start(context: BaseContext, make: Callable[[], Answerer], others: Sequence[Connection]) -> _Worker:
    mine, theirs = context.Pipe()
    inherited = [*others, mine] if context.get_start_method() == "fork" else []
    process = context.Process(target=_serve, args=(theirs, make, inherited), daemon=True)  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    return _Worker(process, mine)


def _serve(pipe: Connection, make: Callable[[], Answerer], inherited: Sequence[Connection]) -> None:
    """A worker's life: answer frames until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pipe
    for other in inherited:  # or this worker would keep its own pipe open after the parent's death
        other.close()
    answerer = make()
    frame = b""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            client, size = pipe.recv()
            if size is not None:
                frame = pipe.recv_bytes(size)
            answer = _guarded(answerer, client, frame)
            pipe.send(isinstance(answer, Refused))
            pipe.send_bytes(answer.reason.encode() if isinstance(answer, Refused) else answer)


def _receive(worker: _Worker) -> bytes | Refused:
    try:
        refused = worker.pipe.recv()
        data = worker.pipe.recv_bytes()
    except (EOFError, ConnectionResetError) as gone:
        worker.process.join(timeout=5)
        client = worker.busy[1] if worker.busy else "no client"
        raise RunError(
            f"a worker process died (exit code {worker.process.exitcode}) while it worked for client {client!r}; "
            "out of memory is the usual cause. Start again with --resume, perhaps with fewer --workers."
        ) from gone
    return Refused(data.decode(errors="replace")) if refused else data


def _spread(load: Mapping[str, int], workers: int) -> dict[str, int]:
    """Give each client, in order, to the worker with the least to do so far. Answers then come nearly in order."""
    totals = [0] * workers
    home = {}
    for client, examples in load.items():
        least = totals.index(min(totals))
        home[client] = least
        totals[least] += examples + 1
    return home
