"""Several methods and seeds on one federation, and what their results say."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wardround import run_folder
from wardround.data import Federation
from wardround.errors import InputError, RunError, suggestion
from wardround.evaluation.predictions import read_predictions
from wardround.evaluation.results import merge_results
from wardround.evaluation.significance import compare_methods
from wardround.federation.files import write_atomically
from wardround.report.images import save_samples
from wardround.run_folder import write_json
from wardround.run_queue import RunQueue, Watcher, parallel
from wardround.systems import System

COMPARISON, COMMAND = "comparison.json", "command.txt"


def compare(
    systems: Sequence[System],
    seeds: Sequence[int],
    out: Path,
    watcher: Watcher,
    workers: int | None = None,
    reference: str | None = None,
    before: Callable[[], None] | None = None,
    command: str | None = None,
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
        before: called once nothing is wrong with the input, before the first run.
        command: what was typed, to be kept with the results.

    Returns:
        `comparison.json`.

    Raises:
        InputError: a run in `out` belongs to another experiment, or systems that cannot be compared.
        RunError: some runs failed; the others are kept and summarised.
    """
    _check_reference(systems, reference)
    if (out / run_folder.CONFIG).exists():
        raise InputError(f"{out}: holds a single run, not a comparison; give another --out")
    with run_folder.disk_trouble(out):
        queue = RunQueue(out, watcher, parallel(systems, workers))
        systems = [queue.settle(system, seeds) for system in systems]
        _check_same_tests(systems, lambda system: queue.federation(system, seeds[0]))
        run_folder.make_folder(out, "the comparison's folder")
        if command is not None:
            write_atomically(out / COMMAND, f"{command}\n".encode(), durable=False)
        if before is not None:
            before()
        for seed in seeds:
            for system in systems:
                queue.put(system, seed)
        queue.work()
        write_summary(systems, seeds, out, queue.federation(systems[0], seeds[0]), reference)
    if queue.failures:
        raise RunError("; ".join(queue.failures))
    found: dict[str, Any] = json.loads((out / COMPARISON).read_text(encoding="utf-8"))
    return found


def _check_reference(systems: Sequence[System], reference: str | None) -> None:
    labels = [system.label for system in systems]
    if reference is not None and reference not in labels:
        raise InputError(f"--reference {reference}: is not among the systems{suggestion(reference, labels)}")


def _check_same_tests(systems: Sequence[System], images: Callable[[System], Federation]) -> None:
    """InputError unless all systems are tested on the same images; their other data options may differ."""
    first, *others = systems
    expected = _tests(images(first))
    for system in others:
        if system.experiment.data != first.experiment.data and _tests(images(system)) != expected:
            raise InputError(
                f"{system.label}: its test images are not those of {first.label}; only systems that are tested on "
                "the same images can be compared"
            )


def _tests(federation: Federation) -> dict[str, list[tuple[str, int]]]:
    """Name and label of each client's test images."""
    return {
        client.name: list(zip(client.test.names, client.test.labels.tolist(), strict=True))
        for client in federation.clients
    }


def write_summary(
    systems: Sequence[System], seeds: Sequence[int], out: Path, federation: Federation, reference: str | None
) -> None:
    """Merge results over seeds and test the differences between methods; only finished systems count."""
    write_json(out / run_folder.ROSTER, run_folder.describe_federation(federation))
    save_samples(federation, out)
    predictions, weights = {}, {}
    for system in systems:
        home = out / system.folder_name
        folders = {seed: home / f"seed-{seed}" for seed in seeds}
        results = [run_folder.kept_results(folder, system.experiment.rounds) for folder in folders.values()]
        finished = [found for found in results if found is not None]
        if len(finished) < len(folders):
            (home / run_folder.RESULTS).unlink(missing_ok=True)  # of fewer seeds, from an earlier call
            continue
        merged = merge_results(finished)
        write_json(home / run_folder.RESULTS, merged)
        weights = {name: entry["n_train"] for name, entry in merged["clients"].items()}
        predictions[system.label] = {seed: read_predictions(folder) for seed, folder in folders.items()}
    (out / COMPARISON).unlink(missing_ok=True)
    if predictions:
        chosen = reference if reference in predictions else None
        write_json(out / COMPARISON, compare_methods(predictions, weights, chosen))
