"""Several methods and seeds on one federation: a queue that survives interruption, and what its results say."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from wardround.config import Experiment, apply, differences, experiment_from, load_experiment, parse_override
from wardround.data import Federation
from wardround.data.read import read_federation
from wardround.errors import InputError, RunError, WardroundError, suggestion
from wardround.evaluation.predictions import read_predictions
from wardround.evaluation.results import merge_results
from wardround.evaluation.significance import compare_methods
from wardround.experiment import describe_federation, pick_device, run, set_up, write_json
from wardround.federation.local import process_context
from wardround.federation.observers import Observer
from wardround.federation.server import Server
from wardround.methods.registry import METHODS, PRESETS
from wardround.report.images import save_samples


@dataclass(frozen=True)
class System:
    """One row of a comparison: a label, and the experiment that it stands for."""

    label: str
    experiment: Experiment

    @property
    def folder_name(self) -> str:
        """The label as a folder's name."""
        return re.sub(r"[^\w.=+,-]+", "-", self.label)

    def seeded(self, seed: int) -> Experiment:
        """The experiment with another seed."""
        return self.experiment.model_copy(update={"seed": seed})


class Watcher(Protocol):
    """Told how a comparison gets on."""

    def queued(self, label: str, seed: int, rounds: int, done: bool) -> None:
        """A run stands in the queue, or is finished already."""

    def advanced(self, label: str, seed: int, round: int) -> None:
        """A run has finished a round."""

    def ended(self, label: str, seed: int, error: str | None) -> None:
        """A run has ended, well or not."""


def systems_named(experiment: Experiment, names: Iterable[str]) -> list[System]:
    """The systems that `--methods` names.

    A name is a label of `[variants]`, a method, or a preset such as `ft-2b`, each followed by any number of
    `:key=value`; a key without a dot is the method's own: `pafp-alt:every=3:model.head=shared`.

    Raises:
        InputError: an unknown name, or keys that do not fit.
    """
    found = [System(name, _variant(experiment, name)) for name in names]
    labels = [system.folder_name for system in found]
    doubled = {label for label in labels if labels.count(label) > 1}
    if doubled:
        raise InputError(f"--methods: {', '.join(sorted(doubled))} is named twice")
    if not found:
        raise InputError("--methods: name at least one method")
    return found


def _variant(experiment: Experiment, name: str) -> Experiment:
    head, *settings = (name,) if name in experiment.variants else tuple(name.split(":"))
    changes = _changes(experiment, head)
    for setting in settings:
        key, value = parse_override(setting)
        changes[key if "." in key else f"method.{key}"] = value
    tree = experiment.to_toml()
    wanted = changes.pop("method.name", head)
    apply(tree, {"method.name": wanted})
    tree["method"] |= experiment.methods.get(wanted, {})
    apply(tree, changes)
    tree["methods"], tree["variants"] = {}, {}
    return experiment_from(tree, f"--methods {name}")


def _changes(experiment: Experiment, head: str) -> dict[str, Any]:
    """What a variant, preset or method changes, as dotted keys."""
    if head in experiment.variants:
        flat = _dotted(experiment.variants[head])
        return {"method.name": experiment.method.get("name", "fedavg"), **flat}
    if head in PRESETS:
        return dict(PRESETS[head])
    if head not in METHODS:
        known = [*METHODS, *PRESETS, *experiment.variants]
        raise InputError(f"--methods: there is no method or variant {head!r}{suggestion(head, known)}")
    return {}


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def compare(
    systems: Sequence[System],
    seeds: Sequence[int],
    out: Path,
    watcher: Watcher,
    workers: int | None = None,
    reference: str | None = None,
) -> dict[str, Any]:
    """Run every system with every seed, several at once, then write what the results say.

    Runs that are finished in `out` are kept; one that was cut short is resumed.

    Args:
        systems: what to compare.
        seeds: one run each.
        out: the comparison's folder.
        watcher: told of progress.
        workers: how many runs at once; None for one a core. A single run uses what is left over.
        reference: label of the system that the others are compared with; None for the best.

    Returns:
        `comparison.json`.

    Raises:
        InputError: a run in `out` belongs to another experiment.
        RunError: some runs failed; the others are kept.
    """
    out.mkdir(parents=True, exist_ok=True)
    queue = _Queue(out, watcher, _parallel(systems, workers))
    systems = [settle(system, queue.federation(system, seeds[0])) for system in systems]
    for seed in seeds:
        for system in systems:
            queue.put(system, seed)
    queue.work()
    write_summary(systems, seeds, out, queue.federation(systems[0], seeds[0]), reference)
    if queue.failures:
        raise RunError("; ".join(queue.failures))
    found: dict[str, Any] = json.loads((out / "comparison.json").read_text())
    return found


def write_summary(
    systems: Sequence[System], seeds: Sequence[int], out: Path, federation: Federation, reference: str | None
) -> None:
    """Merge results over seeds and test the differences between methods; only finished systems count."""
    write_json(out / "federation.json", describe_federation(federation))
    save_samples(federation, out)
    predictions, weights = {}, {}
    for system in systems:
        home = out / system.folder_name
        folders = {seed: home / f"seed-{seed}" for seed in seeds}
        if not all((folder / "results.json").exists() for folder in folders.values()):
            continue
        merged = merge_results([json.loads((f / "results.json").read_text()) for f in folders.values()])
        write_json(home / "results.json", merged)
        weights = {name: entry["n_train"] for name, entry in merged["clients"].items()}
        predictions[system.label] = {seed: read_predictions(folder) for seed, folder in folders.items()}
    if predictions:
        write_json(out / "comparison.json", compare_methods(predictions, weights, reference))


def settle(system: System, federation: Federation) -> System:
    """The system with everything that is `auto` decided, once for all its seeds, so that runs side by side agree."""
    experiment = set_up(system.experiment, federation).experiment
    return System(system.label, experiment)


def _parallel(systems: Sequence[System], workers: int | None) -> int:
    """How many runs at once: a GPU takes one."""
    device = pick_device(systems[0].experiment.training.device)
    return 1 if device.type != "cpu" else workers or os.cpu_count() or 1


@dataclass
class _Job:
    system: System
    seed: int
    process: multiprocessing.process.BaseProcess
    pipe: Connection


@dataclass
class _Queue:
    out: Path
    watcher: Watcher
    slots: int
    failures: list[str] = field(default_factory=list)
    _waiting: list[tuple[System, int]] = field(default_factory=list)
    _data: tuple[tuple[Any, int], Federation] | None = None

    def put(self, system: System, seed: int) -> None:
        """Queue a run unless `out` holds its results."""
        done = _is_finished(self.folder(system, seed), system.seeded(seed))
        self.watcher.queued(system.label, seed, system.experiment.rounds, done)
        if not done:
            self._waiting.append((system, seed))

    def folder(self, system: System, seed: int) -> Path:
        """Where a run lives."""
        return self.out / system.folder_name / f"seed-{seed}"

    def federation(self, system: System, seed: int) -> Federation:
        """The images of a run, read once for all systems that share them."""
        key = (system.experiment.data, seed)
        if self._data is None or self._data[0] != key:
            self._data = (key, read_federation(system.experiment.data, seed))
        return self._data[1]

    def work(self) -> None:
        """Run everything that waits."""
        running: list[_Job] = []
        each = max(1, self.slots // max(1, len(self._waiting)))
        try:
            while self._waiting or running:
                while self._waiting and len(running) < self.slots:
                    running.append(self._start(*self._waiting.pop(0), workers=each))
                ready = wait([job.pipe for job in running])
                for job in [job for job in running if job.pipe in ready]:
                    if not self._listen(job):
                        running.remove(job)
        except KeyboardInterrupt:  # the runs got it too, and finish what they are writing
            for job in running:
                job.process.join()
            raise

    def _start(self, system: System, seed: int, workers: int) -> _Job:
        context = process_context()
        mine, theirs = context.Pipe(duplex=False)
        details = (system, seed, self.folder(system, seed), self.federation(system, seed), workers, theirs)
        process = context.Process(target=_run_job, args=details)  # type: ignore[attr-defined]
        process.start()
        theirs.close()
        return _Job(system, seed, process, mine)

    def _listen(self, job: _Job) -> bool:
        """Take one word from a run; False once it has ended."""
        try:
            word = job.pipe.recv()
        except EOFError:
            job.process.join()
            word = f"its process died (exit code {job.process.exitcode})"
        if isinstance(word, int):
            self.watcher.advanced(job.system.label, job.seed, word)
            return True
        if word:
            self.failures.append(f"{job.system.label}, seed {job.seed}: {word}")
        self.watcher.ended(job.system.label, job.seed, word or None)
        job.pipe.close()
        job.process.join()
        return False


class _Teller(Observer):
    """Tells the comparison of every finished round; a comparison that is gone ends the run."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def round_ended(self, round: int, server: Server) -> None:
        """One word a round."""
        self.pipe.send(round)


def _run_job(system: System, seed: int, folder: Path, federation: Federation, workers: int, pipe: Connection) -> None:
    """One run in a process of its own. Sends rounds, and at last an error or an empty string."""
    try:
        run(
            system.seeded(seed),
            folder,
            resume=True,
            workers=workers,
            label=system.label,
            observers=[_Teller(pipe)],
            federation=federation,
        )
        pipe.send("")
    except (BrokenPipeError, KeyboardInterrupt):
        return
    except WardroundError as error:
        pipe.send(str(error) or type(error).__name__)


def _is_finished(folder: Path, experiment: Experiment) -> bool:
    if not (folder / "results.json").exists():
        return False
    results = json.loads((folder / "results.json").read_text())
    differing = differences(experiment, load_experiment(folder / "config.toml"))
    return results["rounds"] == experiment.rounds and not [line for line in differing if "'auto'" not in line]
