"""A study run: every part of it a comparison, and one table over all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wardround import run_folder
from wardround.comparing import COMPARISON, compare
from wardround.config import DEFAULT_METHOD, Experiment
from wardround.data.read import read_federation
from wardround.errors import InputError, RunError
from wardround.federation.files import write_atomically
from wardround.methods.local_epochs import LocalEpochs
from wardround.report.convergence import save_convergence
from wardround.report.page import write_report
from wardround.report.reading import load
from wardround.report.study_figures import figures_of
from wardround.report.study_page import study_markdown
from wardround.run_folder import write_json
from wardround.run_queue import Watcher
from wardround.study import Part, Study
from wardround.systems import System, systems_named

STUDY, PAGE = "study.json", "study.md"
CONVERGENCE = "convergence.png"


@dataclass(frozen=True)
class Leg:
    """One part of a study on one experiment: what is compared, and where."""

    part: Part
    systems: tuple[System, ...]
    folder: Path


class PartWatcher:
    """Tells another watcher of the runs of one part, with the part's name as `prefix` of theirs."""

    def __init__(self, watcher: Watcher, part: Part) -> None:
        self._watcher, self.prefix = watcher, f"{part.label}: " if part.label else ""

    def queued(self, label: str, seed: int, rounds: int, done: bool) -> None:
        """A run stands in the queue, or is finished already."""
        self._watcher.queued(self.prefix + label, seed, rounds, done)

    def advanced(self, label: str, seed: int, round: int) -> None:
        """A run has finished a round."""
        self._watcher.advanced(self.prefix + label, seed, round)

    def ended(self, label: str, seed: int, error: str | None) -> None:
        """A run has ended, well or not."""
        self._watcher.ended(self.prefix + label, seed, error)


def plan_study(study: Study, experiment: Experiment, out: Path, methods: Sequence[str] = ()) -> list[Leg]:
    """What a study runs on an experiment; nothing is read or run.

    Args:
        study: what is declared.
        experiment: what the declared changes are made to.
        out: the study's folder; a study of several parts has a folder for each in it.
        methods: systems as `compare --methods` takes them, for a study that declares none.

    Raises:
        InputError: keys that do not fit, methods for a study that declares its own systems, no captions for one that
            is about them, or two systems that the experiment makes the same.
    """
    if study.captions and experiment.captions.provider not in study.captions:
        allowed = ", ".join(f'"{name}"' for name in study.captions)
        found = experiment.captions.provider
        raise InputError(f'study {study.name}: compares captions; captions.provider is "{found}" (allowed: {allowed})')
    if methods and study.systems:
        raise InputError(f"--methods: the study {study.name} has systems of its own: {', '.join(study.systems)}")
    legs = []
    for part in study.parts:
        systems = _systems(study, part, experiment, methods)
        _check_different(study, systems)
        systems = equalised(systems, study.reference) if study.equal_epochs else systems
        legs.append(Leg(part, tuple(systems), out / part.folder_name))
    return legs


def _systems(study: Study, part: Part, experiment: Experiment, methods: Sequence[str]) -> list[System]:
    """The systems of one part, in the order of their declaration."""
    where = f"study {study.name}" + (f", {part.label}" if part.label else "")
    if not study.systems:
        own = System(str(experiment.method.get("name", DEFAULT_METHOD)), experiment)
        named = systems_named(experiment, methods) if methods else [own]
        return [System(system.label, system.experiment.changed(part.changes, where)) for system in named]
    method = {"method.name": study.method} if study.method else {}
    return [
        System(label, experiment.changed({**part.changes, **method, **changes}, f"{where}, {label}"))
        for label, changes in study.systems.items()
    ]


def _check_different(study: Study, systems: Sequence[System]) -> None:
    """InputError where the experiment's own keys leave no difference between two declared systems."""
    known: dict[str, str] = {}
    for system in systems:
        digest = system.experiment.digest()
        if digest in known:
            keys = {key for label in (known[digest], system.label) for key in study.systems.get(label, ())}
            raise InputError(
                f"study {study.name}: {known[digest]!r} and {system.label!r} are the same system here; leave "
                f"{' and '.join(sorted(keys)) or 'one of them'} to the study"
            )
        known[digest] = system.label


def equalised(systems: Sequence[System], reference: str | None) -> list[System]:
    """The systems, each with as many rounds as make the local epochs of the one labelled `reference`, by default the
    first; with more rounds they are evaluated less often, so that all are after about as many epochs.
    """
    first = next((system for system in systems if system.label == reference), systems[0]).experiment
    epochs = LocalEpochs(first.bound_method(), first.training).until(first.rounds)
    return [System(system.label, _for_epochs(system.experiment, epochs)) for system in systems]


def _for_epochs(experiment: Experiment, epochs: int) -> Experiment:
    """The experiment with other rounds, unless its method makes no passes at all."""
    rounds = LocalEpochs(experiment.bound_method(), experiment.training).rounds_for(epochs)
    if rounds is None or rounds == experiment.rounds:
        return experiment
    every = max(1, experiment.federation.evaluate_every * rounds // max(1, experiment.rounds))
    options = experiment.federation.model_copy(update={"evaluate_every": every})
    return experiment.model_copy(update={"rounds": rounds, "federation": options})


def check_held_out(study: Study, experiment: Experiment) -> None:
    """InputError where the study asks for a site that never trains and the experiment names none."""
    if study.needs_held_out and not (experiment.data.held_out or experiment.data.held_out_share):
        raise InputError(
            f"study {study.name}: wants images that never train, the same for every part: name a site in "
            "data.held_out, or set data.held_out_share; --without-held-out goes without"
        )


def run_study(
    study: Study,
    legs: Sequence[Leg],
    seeds: Sequence[int],
    out: Path,
    watcher: Watcher,
    workers: int | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Run every part, the next one even where some runs of the last have failed, and write the study's table.

    What is finished in `out` is kept, as `compare` does.

    Args:
        study: what is run.
        legs: as `plan_study` gives them.
        seeds: one run each of every system.
        out: the study's folder.
        watcher: told of progress.
        workers: how many runs at once; None for one a core.
        command: what was typed, to be kept with the results.

    Returns:
        `study.json`.

    Raises:
        InputError: something is wrong with a part, or `out` holds another study.
        RunError: some runs failed; the others are kept and in the table.
    """
    _claim(study, out)
    for leg in legs if len(legs) > 1 else ():  # a part that cannot be must not show after hours
        read_federation(leg.systems[0].experiment.data, seeds[0])
    failures = []
    record: dict[str, Any] = {}
    for leg in legs:
        watched = PartWatcher(watcher, leg.part)
        try:
            compare(leg.systems, seeds, leg.folder, watched, workers, study.reference, command=command)
        except RunError as error:
            failures.append(watched.prefix + str(error))
        if _is_compared(leg):
            write_report(leg.folder)
            save_convergence(leg.folder / CONVERGENCE, load(leg.folder))
        record = write_study(study, legs, out, command)
    if failures:
        raise RunError("; ".join(failures))
    return record


def _claim(study: Study, out: Path) -> None:
    """Make `out` the folder of this study. InputError where it is another's."""
    file = out / STUDY
    if file.exists():
        held = json.loads(file.read_text(encoding="utf-8"))["study"]
        if held != study.name:
            raise InputError(f"{out}: holds the study {held}, not {study.name}; give another --out")
        return
    if any((out / name).exists() for name in (COMPARISON, run_folder.CONFIG)):
        raise InputError(f"{out}: holds runs that are no study; give another --out")
    run_folder.make_folder(out, "the study's folder")
    write_json(file, {"study": study.name, "parts": []})


def _is_compared(leg: Leg) -> bool:
    """Whether any of the part's systems has finished."""
    return (leg.folder / COMPARISON).exists()


def _picture(leg: Leg, out: Path) -> str | None:
    """Where the part's curves are, from the study's folder; None where nothing has been evaluated."""
    file = leg.folder / CONVERGENCE
    return str(file.relative_to(out)) if file.exists() else None


def write_study(study: Study, legs: Sequence[Leg], out: Path, command: str | None = None) -> dict[str, Any]:
    """Write `study.json` and `study.md` from whatever parts have finished systems, and return the former."""
    parts = [
        {
            "part": leg.part.label,
            "folder": leg.part.folder_name,
            "changes": dict(leg.part.changes),
            "convergence": _picture(leg, out),
            "systems": figures_of(leg.folder, [system.label for system in leg.systems], study.reference),
        }
        for leg in legs
        if _is_compared(leg)
    ]
    record = {
        "study": study.name,
        "title": study.title,
        "question": study.question,
        "source": study.source,
        "reference": study.reference,
        "uncoded": study.uncoded,
        "command": command,
        "parts": parts,
    }
    write_json(out / STUDY, record)
    write_atomically(out / PAGE, study_markdown(record).encode(), durable=False)
    return record
