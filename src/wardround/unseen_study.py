"""FM²'s second generalisation experiment: each modality in turn is left out, and learned later from few images."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wardround import run_folder
from wardround.comparing import COMPARISON
from wardround.config import Experiment
from wardround.data import Federation
from wardround.data.read import read_federation
from wardround.errors import InputError, RunError, WardroundError
from wardround.evaluation.results import over_seeds
from wardround.federation.files import write_atomically
from wardround.report.unseen_page import unseen_markdown
from wardround.run_folder import write_json
from wardround.run_queue import RunQueue, Watcher, parallel
from wardround.study import Part
from wardround.studying import STUDY, PartWatcher
from wardround.systems import System, as_folder
from wardround.unseen import FewImages, chosen_modalities, few_images, without_modality
from wardround.unseen_transfer import transfer

UNSEEN, PAGE = "unseen.json", "unseen.md"
FIGURES = ("accuracy", "balanced_accuracy")
STARTS = ("federation", "scratch")


@dataclass(frozen=True)
class Settings:
    """How a modality is learned that came later.

    Attributes:
        fraction: of its training images.
        epochs: passes over them.
    """

    fraction: float = 0.05
    epochs: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise InputError(f"--fraction {self.fraction:g}: expected a share in (0, 1]")
        if self.epochs < 1:
            raise InputError(f"--epochs {self.epochs}: expected 1 or more")


@dataclass
class NarrowedQueue(RunQueue):
    """Runs of federations that lack one modality."""

    modality: str = ""
    _narrowed: tuple[Federation, Federation] | None = field(default=None, init=False)

    def whole(self, system: System, seed: int) -> Federation:
        """The federation with all its modalities."""
        return super().federation(system, seed)

    def federation(self, system: System, seed: int) -> Federation:
        """The images of a run."""
        whole = self.whole(system, seed)
        if self._narrowed is None or self._narrowed[0] is not whole:
            self._narrowed = whole, without_modality(whole, self.modality)
        return self._narrowed[1]


def check_systems(systems: Sequence[System]) -> None:
    """InputError for systems that cannot meet a new modality, or that have other images than the first."""
    for system in systems:
        experiment, method = system.experiment, system.experiment.bound_method()
        if experiment.captions.provider != "none":
            raise InputError(f'{system.label}: images alone are compared here; set captions.provider = "none"')
        if method.needs_text or method.predicts_with_text:
            raise InputError(f"{system.label}: predicts from words for classes; take a method that trains a head")
        if method.transductive:
            raise InputError(f"{system.label}: needs held-out sites, and a new modality has none; take another method")
        if experiment.data != systems[0].experiment.data:
            raise InputError(f"{system.label}: its data.* keys are not those of {systems[0].label}; they must be")


def run_unseen(
    systems: Sequence[System],
    seeds: Sequence[int],
    leave_out: Sequence[str],
    settings: Settings,
    out: Path,
    watcher: Watcher,
    tell: Callable[[str], None],
    workers: int | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Train every system without each modality, let it learn that one from few images, and write one table.

    What is finished in `out` is kept: runs as `compare` keeps them, transfers where the settings are the same. One that
    fails does not stop the others.

    Args:
        systems: what is compared.
        seeds: one run each of every system and modality.
        leave_out: modalities; empty for each in turn.
        settings: of the transfer.
        out: `MODALITY/SYSTEM/seed-N` holds a run and its transfer.
        watcher: told of the runs' progress.
        tell: told of each transfer in words.
        workers: how many runs at once; None for one a core.
        command: what was typed, to be kept with the results.

    Returns:
        `unseen.json`.

    Raises:
        InputError: something is wrong with the systems, the modalities or `out`.
        RunError: some runs or transfers failed; the others are in the table.
    """
    check_systems(systems)
    data = systems[0].experiment.data
    for seed in seeds:  # what cannot be must not show after hours
        names = chosen_modalities(read_federation(data, seed), leave_out)
    _claim(out)
    failures: list[str] = []
    record: dict[str, Any] = {}
    for name in names:
        part = Part(name, {})
        queue = NarrowedQueue(
            out / part.folder_name, PartWatcher(watcher, part), parallel(systems, workers), modality=name
        )
        with run_folder.disk_trouble(out):
            settled = _train(queue, systems, seeds)
            _transfer_all(queue, settled, seeds, settings, tell)
            failures += [f"{name}: {failure}" for failure in queue.failures]
            record = write_unseen(systems, seeds, names, settings, out, command)
    if failures:
        raise RunError("; ".join(failures))
    return record


def _claim(out: Path) -> None:
    """Make `out`; InputError where it holds something else."""
    if any((out / name).exists() for name in (run_folder.CONFIG, COMPARISON, STUDY)):
        raise InputError(f"{out}: holds other runs; give another --out")
    run_folder.make_folder(out, "the folder of all runs")


def _train(queue: NarrowedQueue, systems: Iterable[System], seeds: Sequence[int]) -> list[System]:
    """Run the federations; the systems as they ran."""
    settled = [queue.settle(system, seeds) for system in systems]
    for seed in seeds:
        for system in settled:
            queue.put(system, seed)
    queue.work()
    return settled


def _transfer_all(
    queue: NarrowedQueue, systems: Sequence[System], seeds: Sequence[int], settings: Settings,
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    """The transfers that are not there yet, of all runs that have finished; what fails joins the queue's failures."""
    for seed in seeds:
        for system in systems:
            if _finished(queue, system, seed) and kept_transfer(queue.folder(system, seed), system, settings) is None:
                tell(f"{queue.modality}: {system.label}, seed {seed}, learning it from few images")
                try:
                    _transfer_one(queue, system, seed, settings)
                except WardroundError as error:
                    queue.failures.append(f"{system.label}, seed {seed}: {error}")


def _finished(queue: RunQueue, system: System, seed: int) -> bool:
    return run_folder.kept_results(queue.folder(system, seed), system.experiment.rounds) is not None


def _transfer_one(queue: NarrowedQueue, system: System, seed: int, settings: Settings) -> None:
    """One transfer, into the folder of its run."""
    folder = queue.folder(system, seed)
    few = few_images(queue.whole(system, seed), queue.modality, settings.fraction, seed)
    experiment = run_folder.as_recorded(system.seeded(seed), folder)
    found = transfer(experiment, folder, few, settings.epochs)
    asked = _asked(system.experiment, settings)
    write_json(folder / UNSEEN, {**asked, "modality": queue.modality, "seed": seed, **images_of(few), **found})


def _asked(experiment: Experiment, settings: Settings) -> dict[str, Any]:
    """What a kept transfer must agree with; the run itself is known to be of the same experiment."""
    return {"fraction": settings.fraction, "epochs": settings.epochs, "rounds": experiment.rounds}


def images_of(few: FewImages) -> dict[str, Any]:
    """How many images of each class there were, and which were used."""
    classes, client = few.federation.classes, few.client
    counts = {"used": client.train.counts(len(classes)), "pool": few.pool, "test": client.test.counts(len(classes))}
    images = {kind: dict(zip(classes, found.tolist(), strict=True)) for kind, found in counts.items()}
    return {"images": images, "names": list(client.train.names)}


def kept_transfer(folder: Path, system: System, settings: Settings) -> dict[str, Any] | None:
    """The transfer in a run's folder; None where there is none, or one with other settings."""
    file = folder / UNSEEN
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    asked = _asked(system.experiment, settings)
    return found if {key: found.get(key) for key in asked} == asked else None


def write_unseen(
    systems: Sequence[System],
    seeds: Sequence[int],
    modalities: Sequence[str],
    settings: Settings,
    out: Path,
    command: str | None = None,
) -> dict[str, Any]:
    """Write `unseen.json` and `unseen.md` from the transfers that are there, and return the former."""
    record = {
        "command": command,
        "fraction": settings.fraction,
        "epochs": settings.epochs,
        "modalities": [_of_modality(name, systems, seeds, settings, out) for name in modalities],
    }
    write_json(out / UNSEEN, record)
    write_atomically(out / PAGE, unseen_markdown(record).encode(), durable=False)
    return record


def _of_modality(
    name: str, systems: Sequence[System], seeds: Sequence[int], settings: Settings, out: Path
) -> dict[str, Any]:
    """What is known of one modality: images by seed, and each system's figures."""
    images: dict[str, Any] = {}
    rows = []
    for system in systems:
        home = out / as_folder(name) / system.folder_name
        kept = {seed: kept_transfer(home / f"seed-{seed}", system, settings) for seed in seeds}
        done = {seed: found for seed, found in kept.items() if found is not None}
        images |= {str(seed): found["images"] for seed, found in done.items()}
        if done:
            rows.append({"label": system.label, "method": system.experiment.bound_method().name, **figures(done)})
    return {"modality": name, "folder": as_folder(name), "images": images, "systems": rows}


def figures(done: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Per start and figure its values, mean and deviation over seeds; differences are taken within a seed."""
    values = {
        start: {figure: [found[start][figure] for found in done.values()] for figure in FIGURES} for start in STARTS
    }
    values["difference"] = {
        figure: [after - before for after, before in zip(*(values[start][figure] for start in STARTS), strict=True)]
        for figure in FIGURES
    }
    spreads = {
        kind: {figure: {"values": each, **over_seeds(each)} for figure, each in by_figure.items()}
        for kind, by_figure in values.items()
    }
    parameters = next(iter(done.values()))["parameters"]
    return {"seeds": list(done), "parameters": parameters, **spreads}
