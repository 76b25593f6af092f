"""What the server writes down about itself while it runs, and how `deploy status` shows it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from wardround.errors import InputError
from wardround.federation.files import write_atomically
from wardround.federation.messages import Message
from wardround.federation.observers import Observer
from wardround.federation.rounds import EVALUATE
from wardround.federation.server import Server
from wardround.federation.transport import Refused

STATUS = "status.json"
WRITE_SECONDS = 2.0


class StatusBoard(Observer):
    """Keeps `status.json` true while the server lives.

    Args:
        file: where it is written.
        clients: their names.
        rounds: of the experiment.
        connected: tells who is connected now.
    """

    def __init__(
        self, file: Path, clients: Sequence[str], rounds: int, connected: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self.file, self.connected = file, connected
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._last: dict[str, dict[str, str]] = {name: {} for name in clients}
        self._now: dict[str, Any] = {"state": "waiting for the clients", "round": 0, "rounds": rounds}
        threading.Thread(target=self._live, name="status", daemon=True).start()

    def heard(self, client: str, word: str) -> None:
        """The last word from a client, or about it."""
        with self._lock:
            self._last[client] = {"when": _now(), "word": word}

    def state(self, state: str, **more: Any) -> None:
        """What the server does now."""
        with self._lock:
            self._now |= {"state": state, **more}
        self.write()

    def round_started(self, round: int, clients: Sequence[str]) -> None:
        """A round begins."""
        self.state("running", round=round, asked=list(clients))

    def answered(self, round: int, phase: str, client: str, answer: Message | Refused) -> None:
        """A client has answered."""
        what = "evaluation" if phase == EVALUATE else f"round {round}, {phase}"
        refused = isinstance(answer, Refused)
        self.heard(client, f"{what}: {f'refused, {answer.reason}' if isinstance(answer, Refused) else 'answered'}")
        if refused:
            self.write()

    def round_ended(self, round: int, server: Server) -> None:
        """A round is complete."""
        self.state("running", complete=round)

    def end(self, state: str) -> None:
        """The server ends."""
        self._ended.set()
        self.state(state)

    def write(self) -> None:
        """Write the file."""
        with self._lock:
            there = set(self.connected())
            clients = {name: {"connected": name in there, **last} for name, last in self._last.items()}
            board = {"process": os.getpid(), "written": _now(), **self._now, "clients": clients}
            write_atomically(self.file, json.dumps(board, indent=1).encode(), durable=False)

    def _live(self) -> None:
        while not self._ended.wait(WRITE_SECONDS):
            self.write()


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def read_status(folder: Path) -> dict[str, Any]:
    """The status of the server in `folder`; one whose process is gone is `stopped`.

    Raises:
        InputError: no server has run there.
    """
    file = folder / STATUS
    try:
        board: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"{file}: no server has run in this folder yet (`wardround deploy server {folder}`)"
        ) from error
    if board["state"] not in ("finished", "failed", "stopped") and not _alive(board["process"]):
        board |= {"state": "stopped", "clients": {n: {**c, "connected": False} for n, c in board["clients"].items()}}
    return board


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def status_text(board: dict[str, Any]) -> str:
    """The status for a person."""
    lines = [f"{board['state']}; round {board['round']} of {board['rounds']}; written {board['written']}"]
    width = max(map(len, board["clients"]))
    for name, client in board["clients"].items():
        there = "connected" if client["connected"] else "away     "
        last = f"{client['when']}  {client['word']}" if "when" in client else "not heard of yet"
        lines.append(f"  {name:{width}}  {there}  {last}")
    return "\n".join(lines)
