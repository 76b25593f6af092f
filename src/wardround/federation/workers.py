"""A worker process: what it does, and what its parent sees of it.

The parent sends a client's name and a frame; the worker sends a verdict and an answer. A worker outlives neither
the pipe to its parent nor the parent itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Protocol, TypeVar, runtime_checkable

from wardround.errors import RunError
from wardround.federation.messages import Message, shorten
from wardround.federation.transport import Refused

Result = TypeVar("Result")
ANSWERED, REFUSED, BROKEN = b"answered", b"refused", b"broken"


class Answerer(Protocol):
    """The client half of a federation: whatever answers a frame for a client."""

    def answer(self, client: str, frame: bytes) -> bytes:
        """The reply's frame."""


@runtime_checkable
class HandsOver(Protocol):
    """A client half that takes and gives messages themselves, for whoever lives in its process."""

    def hand(self, client: str, message: Message) -> Message:
        """The reply; its tensors are copies."""


def answer_or_reason(answerer: Answerer, client: str, frame: bytes) -> bytes | Refused:
    """The answer, or why there is none; see `result_or_reason`."""
    return result_or_reason(lambda: answerer.answer(client, frame))


def result_or_reason(answer: Callable[[], Result]) -> Result | Refused:
    """What `answer` gives; an error inside one client becomes a refusal, as it must not stop the others.

    Raises:
        OSError: the disk is full or fails. That is no client's own error, and a checkpoint would lack its state.
    """
    try:
        return answer()
    except OSError:
        raise
    except Exception as error:
        return Refused(_reason(error))


class Worker:
    """The parent's view of one worker.

    Args:
        context: how processes are started.
        make_answerer: called in the worker.
        others: the workers that there are already.
    """

    def __init__(self, context: BaseContext, make_answerer: Callable[[], Answerer], others: Iterable[Worker]) -> None:
        self.pipe, theirs = context.Pipe()
        forked = context.get_start_method() == "fork"
        inherited = [*(other.pipe for other in others), self.pipe] if forked else []
        self.process = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, make_answerer, inherited), daemon=True
        )
        self.process.start()
        theirs.close()
        self._frame: bytes | None = None

    def send(self, client: str, frame: bytes) -> None:
        """Let the worker answer for `client`. The frame that it had last is not sent again.

        Raises:
            RunError: the worker is dead.
        """
        try:
            self.pipe.send((client, frame is not self._frame))
            if frame is not self._frame:
                self.pipe.send_bytes(frame)
        except OSError as gone:
            raise self._death(client) from gone
        self._frame = frame

    def receive(self, client: str) -> bytes | Refused:
        """The answer for `client`.

        Raises:
            RunError: the worker died, or could not begin or go on with its work.
        """
        try:
            verdict = self.pipe.recv_bytes()
            data = self.pipe.recv_bytes()
        except (EOFError, OSError) as gone:
            raise self._death(client) from gone
        if verdict == BROKEN:
            raise RunError(f"a worker process {data.decode()}")
        return data if verdict == ANSWERED else Refused(data.decode())

    def close(self) -> None:
        """Tell the worker to end."""
        with contextlib.suppress(OSError):
            self.pipe.close()

    def end(self, patience: float) -> None:
        """Wait up to `patience` seconds for the worker's end, then kill it."""
        self.process.join(timeout=max(0.0, patience))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _death(self, client: str) -> RunError:
        self.process.join(timeout=5)
        return RunError(
            f"a worker process died (exit code {self.process.exitcode}) while it worked for client {client!r}; "
            "out of memory is the usual cause. Start again with --resume, perhaps with fewer --workers."
        )


def _serve(pipe: Connection, make_answerer: Callable[[], Answerer], inherited: Iterable[Connection]) -> None:
    """A worker's life: answer frames until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pipe
    for other in inherited:  # or this worker would keep pipes open after the parent has closed them
        other.close()
    _end_with_parent()
    answerer = _made(make_answerer)
    frame = b""
    with contextlib.suppress(EOFError, OSError):
        while True:
            client, another = pipe.recv()
            if another:
                frame = pipe.recv_bytes()
            verdict, data = _verdict(answerer, client, frame)
            pipe.send_bytes(verdict)
            pipe.send_bytes(data)


def _made(make_answerer: Callable[[], Answerer]) -> Answerer | Exception:
    try:
        return make_answerer()
    except Exception as error:
        return error


def _verdict(answerer: Answerer | Exception, client: str, frame: bytes) -> tuple[bytes, bytes]:
    if isinstance(answerer, Exception):
        return BROKEN, f"could not begin: {_reason(answerer)}".encode()
    try:
        answer = answer_or_reason(answerer, client, frame)
    except OSError as error:
        return BROKEN, f"could not go on: {_reason(error)}. What is finished is kept; --resume goes on.".encode()
    return (REFUSED, answer.reason.encode()) if isinstance(answer, Refused) else (ANSWERED, answer)


def _end_with_parent() -> None:
    """End at once when the parent is killed, not only when the current client is done."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _reason(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return shorten(f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})", 1000)
