"""A search for every method's best settings on validation images, with the same budget for all methods."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wardround import run_folder
from wardround.config import Experiment, apply
from wardround.data import Federation
from wardround.errors import InputError, RunError
from wardround.evaluation.results import over_seeds, run_summary
from wardround.recording import METRICS, read_lines
from wardround.run_folder import write_json
from wardround.run_queue import RunQueue, Watcher, parallel
from wardround.search_plan import Candidate, Search, Trial, plan
from wardround.systems import System

TRIALS, RECORD, TUNED = "trials", "tuning.json", "tuned.toml"

Record = dict[str, Any]


class TrialQueue(RunQueue):
    """Runs that are given no test images, so that no choice made from them can have seen one."""

    def federation(self, system: System, seed: int) -> Federation:
        """The training and validation images of a run."""
        whole = super().federation(system, seed)
        return replace(whole, clients=tuple(replace(each, test=each.test.take([])) for each in whole.clients))


def tune(
    experiment: Experiment,
    names: Sequence[str],
    out: Path,
    watcher: Watcher,
    search: Search,
    workers: int | None = None,
) -> Record:
    """Run every method's trials, several at once; write `tuning.json`, and `tuned.toml` for `compare`.

    Trials that are finished in `out` are kept; one that was cut short is resumed.

    Args:
        experiment: its `[tune]` section says what is searched.
        names: methods, presets or labels of `[variants]`.
        out: the search's folder.
        watcher: told of progress.
        search: how much is searched, and how.
        workers: how many runs at once; None for one a core.

    Returns:
        `tuning.json`.

    Raises:
        InputError: what `plan` says, methods with different images, no validation images, a model that cannot be
            made, or a trial in `out` that belongs to another experiment.
        RunError: a method has no finished trial.
    """
    if (out / run_folder.CONFIG).exists():
        raise InputError(f"{out}: holds a single run, not a search; give another --out")
    budget, candidates = plan(experiment, names, search)
    numbers = range(experiment.seed, experiment.seed + search.seeds)
    first = [candidate.trials[0].system for candidate in candidates]
    with run_folder.disk_trouble(out):
        queue = TrialQueue(out / TRIALS, watcher, parallel(first, workers))
        federation = _common_images(first, queue, numbers[0])
        candidates = [_settled(candidate, queue, numbers) for candidate in candidates]
        run_folder.make_folder(out, "the search's folder")
        _run([trial.system for candidate in candidates for trial in candidate.trials], queue, numbers)
        record: Record = {
            "search": search.kind,
            "budget": budget,
            "rounds": first[0].experiment.rounds,
            "seeds": list(numbers),
            "criterion": search.criterion,
            "images": {each.name: {"train": len(each.train), "val": len(each.val)} for each in federation.clients},
            "methods": {each.label: _method(each, queue, numbers, search) for each in candidates},
        }
        record["notes"] = _notes(record)
        write_json(out / RECORD, record)
        _write_tuned(experiment, candidates, record, out / TUNED)
    return record


# ---- before any run


def _common_images(systems: Sequence[System], queue: TrialQueue, seed: int) -> Federation:
    """The images that all methods train and are judged on; one system a method.

    Raises:
        InputError: they differ, or there is none to judge by.
    """
    first, *others = systems
    federation = queue.federation(first, seed)
    if not federation.counts("val").sum():
        raise InputError(
            f"{federation.source}: no client has a validation image, and settings are never chosen on test images; "
            "data.val_fraction = 0.1 takes some from the training images (phantoms: data.phantoms.val_per_client)"
        )
    expected = _images(federation)
    for system in others:
        same = system.experiment.data == first.experiment.data
        if not same and _images(queue.federation(system, seed)) != expected:
            raise InputError(
                f"{system.label}: its training or validation images are not those of {first.label}, so their budgets "
                "would not be equal"
            )
    return federation


def _images(federation: Federation) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Names of each client's training and validation images."""
    return [(client.name, client.train.names, client.val.names) for client in federation.clients]


def _settled(candidate: Candidate, queue: TrialQueue, numbers: Sequence[int]) -> Candidate:
    """The candidate with trials in which nothing is `auto`."""
    trials = [replace(trial, system=queue.settle(trial.system, numbers)) for trial in candidate.trials]
    return replace(candidate, trials=tuple(trials))


# ---- the runs, and what they say


def _run(systems: Sequence[System], queue: TrialQueue, numbers: Sequence[int]) -> None:
    """Do what is not done yet. Nobody goes on from a finished trial, so its checkpoints are dropped."""
    for number in numbers:
        for system in systems:
            queue.put(system, number)
    queue.work()
    for number in numbers:
        for system in systems:
            if run_folder.kept_results(queue.folder(system, number), system.experiment.rounds) is not None:
                shutil.rmtree(queue.folder(system, number) / "checkpoints", ignore_errors=True)


def _method(candidate: Candidate, queue: TrialQueue, numbers: Sequence[int], search: Search) -> Record:
    """What one method's trials came to; of equal scores the first in the file's order is the best."""
    trials = [_judged(trial, queue, numbers, search) for trial in candidate.trials]
    finished = [trial for trial in trials if trial["score"] is not None]
    best = max(finished, key=lambda trial: float(trial["score"]), default=None)
    return {
        "searched": candidate.space.values,
        "combinations": candidate.space.size,
        "best": best and {key: best[key] for key in ("label", "values", "score", "std")},
        "trials": trials,
    }


def _judged(trial: Trial, queue: TrialQueue, numbers: Sequence[int], search: Search) -> Record:
    """One trial's entry in `tuning.json`; it has a score once all its seeds have one."""
    system, folders = trial.system, [queue.folder(trial.system, number) for number in numbers]
    results = [run_folder.kept_results(folder, system.experiment.rounds) for folder in folders]
    scores = [
        None if found is None else validation_scores(folder, found)[search.criterion]
        for folder, found in zip(folders, results, strict=True)
    ]
    spread = over_seeds([] if None in scores else scores)
    return {
        "label": system.label,
        "values": trial.values,
        "scores": scores,
        "score": spread["mean"],
        "std": spread["std"],
        "seconds": [None if found is None else _seconds(found) for found in results],
        "failures": [text for text in queue.failures if text.startswith(f"{system.label}, seed ")],
    }


def _seconds(results: Record) -> float:
    """Of training and evaluation over all clients: an interrupted run counts whole."""
    return float(results["seconds"]["train"] + results["seconds"]["evaluate"])


def validation_scores(folder: Path, results: Record) -> dict[str, float | None]:
    """Both means over clients of the last balanced accuracy of their own models on validation images.

    A client that never took part is judged by the server's model; one without validation images is left out.

    Args:
        folder: of a finished run.
        results: its `results.json`, for the numbers of training images, which are the weights.
    """
    own: dict[str, Any] = {}
    received: dict[str, Any] = {}
    for line in read_lines(folder / METRICS):
        for which, kept in (("personal", own), ("received", received)):
            if line.get(which):
                kept[line["client"]] = line[which]["val"]
    weights = {name: entry["n_train"] for name, entry in results["clients"].items()}
    summary = run_summary(received | own, weights)
    return {mean: summary[f"{mean}_average"] for mean in ("unweighted", "weighted")}


def _notes(record: Record) -> list[str]:
    """What a reader of the best values should know."""
    without = [name for name, counts in record["images"].items() if not counts["val"]]
    found = [f"{name} has no validation images and no say in the scores" for name in without]
    for label, method in record["methods"].items():
        if len(method["trials"]) < record["budget"]:
            found.append(
                f"{label} has {method['combinations']} combinations, fewer than the budget of {record['budget']} "
                "trials: all were tried"
            )
        found += [f"failed: {failure}" for trial in method["trials"] for failure in trial["failures"]]
        found += [f"{label}: {text}" for text in _at_the_edge(method)]
    return found


def _at_the_edge(method: Record) -> list[str]:
    """Numbers that are the best of their list and also its end: the optimum may lie beyond."""
    best = method["best"]["values"] if method["best"] else {}
    ranges = {key: values for key, values in method["searched"].items() if len(values) > 2 and _numeric(values)}
    ends = {key: {min(values): "smallest", max(values): "largest"} for key, values in ranges.items()}
    return [
        f"the best {key}, {best[key]}, is the {named[best[key]]} tried; a better one may lie beyond"
        for key, named in ends.items()
        if best.get(key) in named
    ]


def _numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


# ---- the result for `compare`


def _write_tuned(experiment: Experiment, candidates: Sequence[Candidate], record: Record, file: Path) -> None:
    """Write `tuned.toml`; where a method has no finished trial there is none, not even an older one.

    Raises:
        RunError: names those methods and why they failed.
    """
    file.unlink(missing_ok=True)
    best = {label: method["best"] for label, method in record["methods"].items()}
    lost = [label for label, found in best.items() if found is None]
    if lost:
        reasons = [text for label in lost for t in record["methods"][label]["trials"] for text in t["failures"]]
        raise RunError(f"no trial of {', '.join(lost)} is finished: {'; '.join(reasons)}")
    chosen = {each.label: {**each.changes, **best[each.label]["values"]} for each in candidates}
    with_variants(experiment, chosen).write(file)


def with_variants(experiment: Experiment, chosen: Mapping[str, Mapping[str, Any]]) -> Experiment:
    """The experiment with a section `[variants.LABEL]` for each label, from dotted keys.

    `compare` looks for a variant before it looks for a method, so a variant may have a method's name: whoever names
    the method gets the variant, and no other system of the file changes its meaning.
    """
    variants = dict(experiment.variants)
    for label, changes in chosen.items():
        variants[label] = {}
        apply(variants[label], changes)
    return experiment.model_copy(update={"variants": variants})
