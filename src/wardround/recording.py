"""Observers that write a run's folder: metrics, bytes, and the reasons for refusals."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wardround.federation.files import write_atomically
from wardround.federation.messages import Message
from wardround.federation.observers import Observer
from wardround.federation.rounds import EVALUATE
from wardround.federation.server import Server
from wardround.federation.transport import Refused

METRICS, MESSAGES = "metrics.jsonl", "messages.jsonl"


class Recorder(Observer):
    """Appends what happens to `metrics.jsonl` and `messages.jsonl`, and keeps the last scores of every client.

    Args:
        folder: the run's folder.
        resumed: the round that the run resumes after; what was written later, before it was cut short, is dropped.
    """

    def __init__(self, folder: Path, resumed: int = 0) -> None:
        self.folder = folder
        self.personal: dict[str, dict[str, Any]] = {}
        self.received: dict[str, dict[str, Any]] = {}
        self.captioned: dict[str, dict[str, Any]] = {}
        self.bytes = {"up": 0, "down": 0}
        self.train_seconds = 0.0
        self.evaluate_seconds = 0.0
        self.refusals: list[str] = []
        self._started = time.monotonic()
        for name in (METRICS, MESSAGES):
            self._keep_until(name, resumed)

    def round_started(self, round: int, clients: Sequence[str]) -> None:
        """Note the time."""
        self._started = time.monotonic()

    def answered(self, round: int, phase: str, client: str, answer: Message | Refused) -> None:
        """Write what a client said, or why it was refused."""
        if isinstance(answer, Refused):
            self.refusals.append(f"round {round}, {client}: {answer.reason}")
            self._write(METRICS, {"round": round, "client": client, "refused": answer.reason})
            return
        said = answer.scalars
        if said.get("received"):
            # It is the model that the server made in the round before, unless nothing follows any more.
            of = round if phase == EVALUATE else round - 1
            self._write(METRICS, {"round": of, "client": client, "received": {"round": of, **said["received"]}})
            self.received[client] = said["received"]
            self.evaluate_seconds += said["received"]["seconds"]
        if phase != EVALUATE:
            self._write_training(round, client, said)

    def _write_training(self, round: int, client: str, said: Any) -> None:
        line = {"round": round, "client": client, "examples": said["examples"], "seconds": said["seconds"]}
        line |= {
            "train_loss": said["loss"],
            "personal": said.get("personal"),
            "log": said["log"],
            "refused": None,
        }
        if said.get("captioned"):
            line["captioned"] = self.captioned[client] = said["captioned"]
        self._write(METRICS, line)
        self.train_seconds += said["seconds"]
        if said.get("personal"):
            self.personal[client] = said["personal"]
            self.evaluate_seconds += said["personal"]["seconds"]

    def round_ended(self, round: int, server: Server) -> None:
        """Write the server's own numbers."""
        self._write(METRICS, {"round": round, "server": server.log, "seconds": time.monotonic() - self._started})

    def traffic(self, round: int, phase: str, entries: dict[tuple[str, str], int]) -> None:
        """Write bytes; those of the final evaluation are no part of training and are not counted."""
        if phase == EVALUATE:
            return
        for (client, direction), size in entries.items():
            self.bytes[direction] += size
            self._write(MESSAGES, {"round": round, "client": client, "direction": direction, "bytes": size})

    def checkpointing(self, round: int) -> None:
        """Wait until the disk has the lines of a round before it gets the round's checkpoint."""
        for name in (METRICS, MESSAGES):
            with (self.folder / name).open("a") as file:
                os.fsync(file.fileno())

    def _write(self, name: str, line: dict[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(_as_line(line))

    def _keep_until(self, name: str, round: int) -> None:
        """Drop all that was written after the end of `round`; take the rest into account.

        The server's line is a round's last one. After it may stand evaluations of that round's aggregated model,
        which are done again.
        """
        file = self.folder / name
        kept = []
        for line in read_lines(file):
            if line["round"] > round:
                break
            kept.append(line)
            self._recall(line)
            if "server" in line and line["round"] == round:
                break
        write_atomically(file, "".join(map(_as_line, kept)).encode(), durable=False)

    def _recall(self, line: dict[str, Any]) -> None:
        if "direction" in line:
            self.bytes[line["direction"]] += line["bytes"]
        if line.get("refused"):
            self.refusals.append(f"round {line['round']}, {line['client']}: {line['refused']}")
        self.train_seconds += (line.get("seconds") or 0.0) if "client" in line else 0.0
        if line.get("captioned"):
            self.captioned[line["client"]] = line["captioned"]
        for which, kept in (("personal", self.personal), ("received", self.received)):
            if line.get(which):
                kept[line["client"]] = line[which]
                self.evaluate_seconds += line[which]["seconds"]


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """What each line of a log says, up to one that a crash has cut short; nothing where there is no file."""
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            yield json.loads(text)
        except ValueError:
            return


def _as_line(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"
