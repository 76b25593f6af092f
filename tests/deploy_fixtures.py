"""Deployments that take seconds: an experiment with enough images to speak of, folders for all sides, processes."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiment_fixtures import CLIENTS, tiny
from wardround.config import Experiment
from wardround.deploy.founding import Plan, found
from wardround.deploy.settings import ServerSettings

ENOUGH = {
    "data.phantoms.train_per_client": 60,
    "data.phantoms.val_per_client": 60,
    "data.phantoms.test_per_client": 60,
}  # twenty of each class


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def spoken_of(**changes: Any) -> Experiment:
    """The tiny experiment with enough images that nothing has to be withheld."""
    return tiny(**changes).changed(ENOUGH, "deployment")


def founded(out: Path, experiment: Experiment | None = None, **choices: Any) -> list[Path]:
    """The folders of all sides: the server's, then the clients'."""
    settings = ServerSettings(host="127.0.0.1", listen="127.0.0.1", port=free_port())
    plan = {"clients": CLIENTS, "classes": (), "min_count": 20} | choices
    return found(Plan(experiment or spoken_of(), settings=settings, **plan), out)


def deploy(*arguments: object, log: Path) -> subprocess.Popen[bytes]:
    """`wardround deploy ARGUMENTS` in a process of its own; what it says goes to `log`."""
    program = [sys.executable, "-c", "from wardround.cli import main; main()", "deploy", *map(str, arguments)]
    with log.open("ab") as stream:
        return subprocess.Popen(program, stdout=stream, stderr=stream)


def wait_until(true: Callable[[], bool], seconds: float = 120, what: str = "it") -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


def said(log: Path) -> str:
    """What a process has said so far."""
    return log.read_text() if log.exists() else ""
