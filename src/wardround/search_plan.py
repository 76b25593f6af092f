"""The trials of a search: which values each method is run with, under one budget for all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from wardround.config import Experiment, dotted
from wardround.errors import InputError
from wardround.methods.registry import PRESETS
from wardround.search_space import Combination, SearchSpace, search_space
from wardround.seeds import numpy_stream
from wardround.systems import System, systems_named

# What makes runs of two methods cost the same, beside their images.
EQUAL = ("rounds", "training.local_epochs", "federation.participation")


@dataclass(frozen=True)
class Search:
    """How much is searched, and how.

    Attributes:
        kind: grid: every combination; random: `budget` of them, drawn evenly and never twice.
        budget: trials of each method; None, of a grid alone, for the size of the largest grid.
        seeds: runs of each trial, from the experiment's own seed upwards.
        rounds: of each run; None for the experiment's own number.
        criterion: the mean over clients that a trial is judged by; weights are training images.
    """

    kind: Literal["grid", "random"] = "grid"
    budget: int | None = None
    seeds: int = 1
    rounds: int | None = None
    criterion: Literal["unweighted", "weighted"] = "unweighted"


@dataclass(frozen=True)
class Trial:
    """One combination of values, and the system that it makes."""

    values: Combination
    system: System


@dataclass(frozen=True)
class Candidate:
    """A method in the search.

    Attributes:
        label: the method, preset or variant.
        changes: the dotted keys that the label itself sets.
        space: what is searched.
        trials: what is run.
    """

    label: str
    changes: Mapping[str, Any]
    space: SearchSpace
    trials: tuple[Trial, ...] = ()


def plan(experiment: Experiment, names: Sequence[str], search: Search) -> tuple[int, list[Candidate]]:
    """The budget in trials, and every method with its own trials.

    Args:
        experiment: its `[tune]` section says what is searched.
        names: methods, presets or labels of `[variants]`.
        search: how much is searched, and how.

    Raises:
        InputError: nothing to search, keys or values that do not fit, a grid above the budget, or methods whose runs
            would not be equally long.
    """
    if search.kind == "random" and search.budget is None:
        raise InputError("--search random: needs --budget, the number of trials of each method")
    shortened = experiment if search.rounds is None else experiment.model_copy(update={"rounds": search.rounds})
    systems = systems_named(shortened, [_label(experiment, name) for name in names])
    _check_equal(systems)
    candidates = [_candidate(experiment, system) for system in systems]
    budget = search.budget or max(candidate.space.size for candidate in candidates)
    found = [replace(each, trials=_trials(each, shortened, search, budget)) for each in candidates]
    _check_folders([trial.system for candidate in found for trial in candidate.trials])
    return budget, found


def _label(experiment: Experiment, name: str) -> str:
    """A name of `--methods` as the tuned experiment will have it: methods and presets in lower case."""
    if name in experiment.variants:
        return name
    if ":" in name:
        raise InputError(
            f"--methods {name}: `tune` takes methods, presets and labels of [variants], because the best values are "
            "written under that name; what stands after the colon can be put into a variant"
        )
    return name.lower()


def _candidate(experiment: Experiment, system: System) -> Candidate:
    """A method with what its label sets and what is searched, but no trials yet."""
    label, method = system.label, system.experiment.method["name"]
    preset = PRESETS.get(label, {"method.name": label})
    changes = experiment.variant(label) if label in experiment.variants else preset
    return Candidate(label, changes, search_space(experiment, label, method, changes.keys()))


def _check_equal(systems: Sequence[System]) -> None:
    """InputError unless a run is as long for every method."""
    for key in EQUAL:
        found = {system.label: dotted(system.experiment.to_toml())[key] for system in systems}
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{label}: {value}" for label, value in found.items())
            raise InputError(f"{key} differs between the methods ({shown}), so their budgets would not be equal")


def _trials(candidate: Candidate, experiment: Experiment, search: Search, budget: int) -> tuple[Trial, ...]:
    """The candidate's trials, once every value, drawn or not, has proved allowed."""
    label, space = candidate.label, candidate.space
    for key, values in space.values.items():
        for value in values:
            experiment.changed({**candidate.changes, **space.combination(0), key: value}, f"[tune] {label}")
    if search.kind == "grid" and space.size > budget:
        raise InputError(
            f"{label}: its grid has {space.size} combinations, the budget is {budget} trials; shorten the lists of "
            "[tune], raise --budget, or draw from the grid with --search random"
        )
    stream = numpy_stream(experiment.seed, "tuning", client=label)
    chosen = space.grid() if search.kind == "grid" else space.sample(budget, stream)
    return tuple(_trial(candidate, experiment, values) for values in chosen)


def _trial(candidate: Candidate, experiment: Experiment, values: Combination) -> Trial:
    label = " ".join([candidate.label, *settings(values)])
    return Trial(values, System(label, experiment.changed({**candidate.changes, **values}, label)))


def settings(values: Combination) -> list[str]:
    """Values for a person: each key by its last part, or whole where two keys share that part.

    >>> settings({"training.lr": 0.03, "method.mu": 1})
    ['lr=0.03', 'mu=1']
    """
    short = [key.rpartition(".")[2] for key in values]
    names = [last if short.count(last) == 1 else key for key, last in zip(values, short, strict=True)]
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values.values()]
    return [f"{name}={text}" for name, text in zip(names, texts, strict=True)]


def _check_folders(systems: Sequence[System]) -> None:
    """InputError unless every trial has a folder of its own."""
    taken: dict[str, str] = {}
    for system in systems:
        other = taken.setdefault(system.folder_name, system.label)
        if other != system.label:
            raise InputError(f"[tune]: the trials {other!r} and {system.label!r} would share one folder")
