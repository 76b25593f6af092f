"""A run's folder: who may write into it, what it says of itself, and what a resumed run must agree with."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from wardround import __version__
from wardround.config import Experiment, differences, load_experiment
from wardround.data import Federation
from wardround.data.federation import SPLITS
from wardround.errors import InputError, RunError
from wardround.federation.files import write_atomically
from wardround.training.selftest import CHOICES

CONFIG, ROSTER, ENVIRONMENT, RESULTS = "config.toml", "federation.json", "environment.json", "results.json"
LOCK = ".lock"


def claim(out: Path, experiment: Experiment, resume: bool) -> None:
    """Make `out`, unless it holds something that must not be overwritten.

    Raises:
        InputError: it holds another run, or the run of another experiment, or cannot be made.
    """
    config = out / CONFIG
    try:
        out.mkdir(parents=True, exist_ok=True)
        strangers = not config.exists() and any(path.name != LOCK for path in out.iterdir())
    except OSError as error:
        raise InputError(f"{out}: cannot be the run's folder ({error.strerror or error})") from error
    if config.exists() and not resume:
        raise InputError(f"{out}: holds a run already; give another --out, or --resume to go on with it")
    if strangers:
        raise InputError(f"{out}: is not empty and holds no run; give another --out")
    check_same_experiment(out, experiment)


def check_same_experiment(out: Path, experiment: Experiment) -> None:
    """InputError that names the keys in which `experiment` differs from the run that `out` holds, if it holds one."""
    config = out / CONFIG
    differing = differences(experiment, load_experiment(config)) if config.exists() else []
    if differing:
        raise InputError(f"{out}: belongs to another experiment: {'; '.join(differing)}")


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keep other processes from running in `out`. The lock ends with this process, however it ends.

    Raises:
        InputError: another process is running there.
    """
    file = out / LOCK
    with file.open("w") as handle:
        _lock(handle.fileno(), out)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # where nothing was written, nothing is left
                out.rmdir()


def _lock(handle: int, out: Path) -> None:
    try:
        import fcntl  # absent on Windows, which then goes without
    except ImportError:
        return
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as busy:
        raise InputError(f"{out}: another process is running in it") from busy
    except OSError:
        return  # a file system without locks


def make_folder(out: Path, what: str) -> None:
    """Make the folder `out`; InputError where it cannot be `what`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be {what} ({error.strerror or error})") from error


@contextlib.contextmanager
def disk_trouble(out: Path) -> Iterator[None]:
    """Turn a disk that is full or fails into a RunError that says how to go on."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        what = f"{error.filename or out}: {error.strerror or error}"
        raise RunError(f"{what}. What is finished is kept; once that is mended, --resume goes on.") from error


def kept_results(out: Path, rounds: int) -> dict[str, Any] | None:
    """The results in `out`, if they are those of `rounds` rounds."""
    file = out / RESULTS
    if not file.exists():
        return None
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return results if results["rounds"] == rounds else None


def as_recorded(experiment: Experiment, out: Path) -> Experiment:
    """A resumed run computes as it began: what is `auto` stays what was chosen then."""
    config = out / CONFIG
    if not config.exists():
        return experiment
    then = load_experiment(config).training
    chosen = {key: getattr(then, key) for key in CHOICES}
    return experiment.model_copy(update={"training": experiment.training.model_copy(update=chosen)})


def recorded_digest(out: Path) -> str | None:
    """The digest that the run's checkpoints carry: the first one, as a later version may digest other keys."""
    file = out / ENVIRONMENT
    found: str | None = json.loads(file.read_text(encoding="utf-8")).get("digest") if file.exists() else None
    return found


def check_same_federation(out: Path, federation: Federation) -> None:
    """InputError unless the images are those that the run in `out`, if any, began with, as far as counts tell."""
    file = out / ROSTER
    if not file.exists():
        return
    then, now = json.loads(file.read_text(encoding="utf-8")), describe_federation(federation)
    for words in ("classes", "modalities"):
        if then[words] != now[words]:
            raise InputError(f"{out}: began with the {words} {then[words]}, data.path now has {now[words]}")
    before, after = ({client["name"]: client["counts"] for client in roster["clients"]} for roster in (then, now))
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        raise InputError(
            f"{out}: began with other images than data.path has now; clients whose numbers differ: {', '.join(changed)}"
        )


def check_same_captions(out: Path, captions: Mapping[str, Any]) -> None:
    """InputError unless the captions are those that the run in `out`, if any, began with; their file may have changed.

    `captions` is their record, empty without any.
    """
    file = out / ROSTER
    then = (json.loads(file.read_text(encoding="utf-8")).get("captions") or {}) if file.exists() else captions
    before, after = then.get("clients", {}), captions.get("clients", {})
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        raise InputError(
            f"{out}: began with other captions than there are now; clients whose captions differ: {', '.join(changed)}"
        )


def describe(
    out: Path,
    experiment: Experiment,
    federation: Federation,
    device: torch.device,
    digest: str | None,
    captions: Mapping[str, Any] | None = None,
) -> None:
    """Write what the run is, before it starts; `captions` is the record of its captions, if it has any."""
    experiment.write(out / CONFIG)
    write_json(out / ENVIRONMENT, environment(device) | {"digest": digest})
    write_json(out / ROSTER, describe_federation(federation) | {"captions": captions or None})


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and machine, for a reader who compares two runs."""
    return {
        "wardround": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cores": cores(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
    }


def commit() -> str | None:
    """The commit of the source that runs, marked where it has been changed since; None for an installed package."""
    here = Path(__file__).parent
    try:
        tracked = _git(here, "ls-files", "--error-unmatch", Path(__file__).name)
        return _git(here, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") if tracked else None
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    found = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True, timeout=10)
    return found.stdout.strip()


def cores() -> int:
    """Processor cores that this process may use, which a container or a scheduler may limit."""
    usable = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(usable(0)) if usable else os.cpu_count() or 1


def describe_federation(federation: Federation) -> dict[str, Any]:
    """`federation.json`: who has how many images of what, training images of each modality too where they are here."""
    counts = {split: federation.counts(split).tolist() for split in SPLITS}
    elsewhere, kinds = federation.is_elsewhere, len(federation.modalities)
    return {
        "source": federation.source,
        "classes": list(federation.classes),
        "modalities": list(federation.modalities),
        "notes": list(federation.notes),
        "clients": [
            {
                "name": client.name,
                "counts": {split: counts[split][i] for split in SPLITS},
                "modality_counts": None if elsewhere else client.train.modality_counts(kinds).tolist(),
            }
            for i, client in enumerate(federation.clients)
        ],
        "held_out": [
            {"name": site.name, "counts": site.test.counts(len(federation.classes)).tolist()}
            for site in federation.held_out
        ],
    }


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_atomically(file, json.dumps(value, indent=1).encode(), durable=False)
