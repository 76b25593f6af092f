"""Experiments that take about a second, processes that die when told to, and what a run leaves behind."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wardround.config import Experiment, experiment_from
from wardround.federation.observers import Observer

CLIENTS = ("site-01", "site-02", "site-03")

# Nothing here is `auto`: no self-test is needed, and no measured choice can differ.
TINY: dict[str, Any] = {
    "seed": 3,
    "rounds": 4,
    "data": {
        "source": "phantoms",
        "image_size": 32,
        "phantoms": {
            "clients": 3,
            "classes": 3,
            "train_per_client": 12,
            "val_per_client": 3,
            "test_per_client": 6,
            "feature_skew": 0.5,
        },
    },
    "model": {"backbone": "wardround:resnet4-lib", "pretrained": False, "finetune_blocks": 1},
    "training": {"batch_size": 8, "memory_format": "contiguous", "depthwise": "library", "device": "cpu"},
    "method": {"name": "fedavg"},
    "federation": {"evaluate_every": 2},
    "transport": {"workers": 1},
}


def tiny(**changes: Any) -> Experiment:
    """A tiny experiment; `method__name="pafp"` changes the key `method.name`."""
    base = experiment_from(TINY, "tiny")
    return base.changed({key.replace("__", "."): value for key, value in changes.items()}, "tiny")


def tiny_file(folder: Path, **changes: Any) -> Path:
    """The tiny experiment as a file."""
    file = folder / "tiny.toml"
    tiny(**changes).write(file)
    return file


def checkpoint_bytes(run: Path, round: int | None = None) -> dict[str, bytes]:
    """Every file of every checkpoint, or of one, by its path below the run's folder."""
    files = sorted((run / "checkpoints" / ("" if round is None else f"round-{round:04d}")).rglob("*"))
    return {str(file.relative_to(run)): file.read_bytes() for file in files if file.is_file()}


def figures(run: Path) -> dict[str, Any]:
    """`results.json` without seconds."""
    return untimed(json.loads((run / "results.json").read_text()))


def lines(run: Path, name: str = "metrics.jsonl") -> list[Any]:
    """The lines of a log without seconds."""
    return [untimed(json.loads(line)) for line in (run / name).read_text().splitlines()]


def untimed(value: Any) -> Any:
    """`value` without any key `seconds`."""
    if isinstance(value, dict):
        return {key: untimed(inner) for key, inner in value.items() if key != "seconds"}
    return [untimed(inner) for inner in value] if isinstance(value, list) else value


def in_a_process(work: Callable[[], object], words: Path | None = None) -> int:
    """Do `work` in a forked process; its exit status, negative for a signal. What it prints goes to `words`."""

    def quietly() -> None:
        sys.stdout = sys.stderr = open(words or os.devnull, "w", buffering=1)  # noqa: SIM115 - until the end
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()

    process = multiprocessing.get_context("fork").Process(target=quietly)
    process.start()
    process.join(timeout=120)
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    assert process.exitcode is not None, "the process did not end"
    return process.exitcode


def command_line(*arguments: object) -> None:
    """`wardround ARGUMENTS`, as a process of its own would run it."""
    from wardround.cli import main

    sys.argv = ["wardround", *map(str, arguments)]
    main()


class KilledWhen(Observer):
    """Kills its own process, as a power cut would, at one event of one round."""

    def __init__(self, event: str, round: int) -> None:
        setattr(self, event, lambda at, *_: os.kill(os.getpid(), signal.SIGKILL) if at == round else None)
