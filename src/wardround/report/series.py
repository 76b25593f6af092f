"""What the curves show, gathered from the lines of a method's runs: means over seeds with their spread."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import cast

import numpy as np

from wardround.evaluation.metrics import Floats, Metrics, merge_confusions, reliability
from wardround.evaluation.predictions import pooled
from wardround.evaluation.results import Results, client_results, summarise
from wardround.methods.local_epochs import recorded_epochs
from wardround.report.plots import Series
from wardround.report.reading import Run, Scores, System
from wardround.report.svg import MARKERS

Point = tuple[int, float]
"""(round or local epoch, value)"""


def over_runs(label: str, points: Iterable[Point], look: int = 0, dash: int = 0) -> Series:
    """One line from the points of several runs: at each place their mean and standard deviation (ddof 1)."""
    at: dict[int, list[float]] = defaultdict(list)
    for round, value in points:
        if math.isfinite(value):
            at[round].append(value)
    rounds = sorted(at)
    spread = [float(np.std(at[r], ddof=1)) if len(at[r]) > 1 else 0.0 for r in rounds]
    return Series(label, rounds, [float(np.mean(at[r])) for r in rounds], spread, look, dash)


def accuracy_curve(
    system: System, client: str, which: str, split: str, label: str, look: int = 0, dash: int = 0
) -> Series:
    """Balanced accuracy in percent of the model `which` ("personal" or "received") at `client`, over rounds."""
    points = (
        (round, 100 * scores["balanced_accuracy"])
        for run in system.runs
        for round, name, scores in run.scores(which, split)
        if name == client and scores.get("balanced_accuracy") is not None
    )
    return over_runs(label, points, look, dash)


def convergence_curve(system: System, metric: str, label: str, look: int = 0, client: str | None = None) -> Series:
    """A metric of the personal models on test images, in percent, over local epochs: at `client`, or the mean over
    those that were evaluated. Colours start again after the eighth line, dashed.
    """
    points = (point for run in system.runs for point in _by_epoch(run, metric, client))
    return over_runs(label, points, look, look // len(MARKERS))


def _by_epoch(run: Run, metric: str, client: str | None) -> list[Point]:
    """(local epochs, metric in percent) of one run, wherever it was evaluated."""
    epochs, at = recorded_epochs(run.config), defaultdict[int, list[float]](list)
    for round, name, scores in run.scores("personal", "test"):
        if client in (None, name):
            at[round] += _number(scores.get(metric))
    return [(epochs.until(round), 100 * float(np.mean(values))) for round, values in at.items() if values]


def logged_names(systems: Sequence[System]) -> list[str]:
    """Names of all numbers that clients and servers logged, in the order of their first appearance."""
    found: dict[str, None] = {}
    for run in (run for system in systems for run in system.runs):
        for values in (*(line.get("log") or {} for line in run.lines.values()), *run.server.values()):
            found |= dict.fromkeys(name for name, value in values.items() if _number(value))
    return list(found)


def client_log(run: Run, name: str, client: str | None = None) -> list[Point]:
    """What clients logged as `name` in one run: at `client`, or the mean over all clients of each round."""
    at: dict[int, list[float]] = defaultdict(list)
    for (round, who), line in sorted(run.lines.items()):
        value = line.get(name) if name == "train_loss" else (line.get("log") or {}).get(name)
        if client in (None, who):
            at[round] += _number(value)
    return [(round, float(np.mean(values))) for round, values in at.items() if values]


def server_log(run: Run, name: str) -> list[Point]:
    """What the server logged as `name` in one run."""
    return [(round, value) for round, v in sorted(run.server.items()) for value in _number(v.get(name))]


def bytes_by_round(system: System, label: str, ways: Collection[str], look: int = 0) -> Series:
    """Megabytes of all clients together over the rounds, in the directions `ways` (mean over seeds)."""
    points: list[Point] = []
    for run in system.runs:
        totals: dict[int, int] = defaultdict(int)
        for message in run.messages:
            if message["direction"] in ways:
                totals[int(message["round"])] += int(message["bytes"])
        points += [(round, total / 1e6) for round, total in totals.items()]
    return over_runs(label, points, look)


def bytes_by_client(system: System) -> dict[str, tuple[float, float]]:
    """(up, down) bytes of each client in one run, mean over seeds."""
    totals: dict[str, list[float]] = {}
    for message in (message for run in system.runs for message in run.messages):
        pair = totals.setdefault(str(message["client"]), [0.0, 0.0])
        pair[message["direction"] == "down"] += message["bytes"] / len(system.runs)
    return {client: (up, down) for client, (up, down) in totals.items()}


def last_scores(run: Run, which: str = "personal", split: str = "test") -> dict[str, Scores]:
    """The METRICS of each client's last evaluation of the model `which`."""
    return {client: scores for _, client, scores in run.scores(which, split)}


def pooled_confusion(system: System) -> list[list[int]]:
    """The summed confusion matrices of the last personal models on all clients' test images, over all seeds."""
    return merge_confusions(
        scores["confusion"] for run in system.runs for scores in last_scores(run).values() if scores["n"]
    )


def pooled_reliability(system: System) -> tuple[Floats, Floats, Floats] | None:
    """Images, right answers and summed confidences a bin, over all clients' test images and seeds; None without any."""
    pools = [pool for run in system.runs if (pool := pooled(run.folder)) is not None]
    found = [reliability(*pool) for pool in pools if len(pool[1]) and np.isfinite(pool[0]).all()]
    if not found:
        return None
    images, right, confidence = (np.sum(parts, axis=0) for parts in zip(*found, strict=True))
    return images, right, confidence


def so_far(system: System, clients: Sequence[str]) -> Results | None:
    """What `results.json` would say of `clients` if the system's one run ended now; None before any evaluation.

    A client's figures are those of its last evaluation, and its weight is what it trained on.
    """
    run = system.runs[0]
    scores = last_scores(run)
    last = {client: [cast(Metrics, scores[client])] for client in clients if client in scores}
    if not last:
        return None
    trained = {client: int(line.get("examples") or 0) for (_, client), line in sorted(run.lines.items())}
    return {
        "method": system.method,
        "label": system.label,
        "seeds": [run.seed],
        "clients": {client: client_results(found, trained[client]) for client, found in last.items()},
        "summary": summarise(last, trained),
    }


def _number(value: object) -> list[float]:
    """`value` alone in a list where it is a finite number, else an empty list."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return []
    return [float(value)]
