"""What a report says in words: the summary above everything else, and what to beware of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from wardround.report.reading import Record, Roster, Run, System
from wardround.report.words import listed, percent, plural

MOST_PLACES = 8
"""Refused updates of one reason that are listed one by one."""

COARSE = 0.10
"""A client where one test image moves balanced accuracy by this much or more is named."""


@dataclass(frozen=True)
class Caution:
    """One thing to beware of: a headline and, where there are several cases, one line each."""

    headline: str
    cases: tuple[str, ...] = ()


def title(record: Record) -> str:
    """The page's heading."""
    place = f" on {record.roster.source}" if record.roster else ""
    if record.kind == "run":
        return f"{record.systems[0].label}{place}"
    return f"Comparison of {plural(len(record.systems), 'method')}{place}"


def summary(record: Record) -> list[str]:
    """The summary as sentences, in plain words."""
    return _comparison_summary(record) if record.kind == "compare" else _run_summary(record.systems[0])


def _run_summary(system: System) -> list[str]:
    """One method, one seed."""
    run = system.runs[0]
    if system.results is None or run.results is None:
        planned = f" of {run.rounds_planned}" if run.rounds_planned else ""
        return [f"This run of {system.label} is unfinished: it stands at round {run.rounds_done}{planned}."]
    mean = _mean(system.results["summary"], "unweighted_average")
    sentences = [
        f"{system.label} was trained for {plural(system.results['rounds'], 'round')} with seed {run.seed}; each "
        f"client's model was then tested on that client's own images.",
        f"Their mean balanced accuracy is {percent(mean)} %, {_weakest(system.results)}",
    ]
    if system.results.get("global"):
        served = _mean(system.results["global"]["summary"], "unweighted_average")
        sentences.append(f"The server's model reaches {percent(served)} % on the same images.")
    sentences.append("One run cannot tell a better method from a luckier one: compare several, over several seeds.")
    return sentences


def _weakest(results: dict[str, Any]) -> str:
    """The client with the lowest balanced accuracy, in words."""
    scores = {name: _client_mean(results, name) for name in results["clients"]}
    known = {name: score for name, score in scores.items() if score is not None}
    if not known:
        return "no client having test images."
    worst = min(known, key=lambda name: known[name])
    return f"the lowest {percent(known[worst])} % at {worst}."


def _client_mean(results: dict[str, Any], client: str) -> float | None:
    """A client's balanced accuracy, averaged over the seeds in which it is defined."""
    known = [value for value in results["clients"][client]["balanced_accuracy"] if value is not None]
    return float(np.mean(known)) if known else None


def _mean(summary: dict[str, Any], figure: str) -> float | None:
    """The mean over seeds of one figure of a summary."""
    value: float | None = summary[figure]["mean"]
    return value


def _comparison_summary(record: Record) -> list[str]:
    """Several methods: which is best, is it more than noise, what could this test set show."""
    done = {system.label: system.results for system in record.systems if system.results is not None}
    means = {label: _mean(results["summary"], "unweighted_average") for label, results in done.items()}
    known = {label: mean for label, mean in means.items() if mean is not None}
    sentences = [_setting(record)]
    if not known:
        return [*sentences, "None of them has finished yet."]
    best = max(known, key=lambda label: known[label])
    sentences.append(
        f"{best} has the highest balanced accuracy, {percent(known[best])} % in the mean over clients, each tested "
        "with its own model on its own images."
    )
    return sentences + (_noise(record.comparison, best) if record.comparison else [_untested(len(known))])


def _setting(record: Record) -> str:
    """What was compared on what."""
    labels = listed([system.label for system in record.systems])
    seeds = max(len(system.results["seeds"] if system.results else system.runs) for system in record.systems)
    rounds = sorted({system.results["rounds"] for system in record.systems if system.results})
    length = f" for {_from_to(rounds)}{plural(rounds[-1], 'round')}" if rounds else ""
    clients = f" on {plural(len(record.roster.clients), 'client')}" if record.roster else ""
    return f"{labels} were trained{clients}{length}, with {plural(seeds, 'seed')} each."


def _from_to(rounds: list[int]) -> str:
    """What stands before the largest number of rounds, where there are others."""
    return f"{rounds[0]} to " if len(rounds) > 1 else ""


def _untested(methods: int) -> str:
    """What to say when no comparison was made."""
    if methods < 2:
        return "With one finished method there is nothing to compare it with."
    return "Whether its lead is more than noise has not been tested."


def _noise(comparison: dict[str, Any], best: str) -> list[str]:
    """Which differences from the reference are more than noise, and the smallest that could be shown."""
    reference, pairs = comparison["reference"], comparison["pairs"]
    groups: dict[str, list[str]] = {}
    for pair in pairs:
        groups.setdefault(pair["verdict"], []).append(pair["method"])
    words = {
        "worse": "it is better by more than noise than",
        "better": "it is worse by more than noise than",
        "not distinguishable": "it cannot be told apart from",
    }
    said = [f"{words[v]} {listed(groups[v], 'or' if v[0] == 'n' else 'and')}" for v in words if v in groups]
    sentences = []
    if said:
        opening = "" if reference == best else f"Against the reference {reference}: "
        text = opening + "; ".join(said)
        sentences.append(f"{text[0].upper()}{text[1:]}.")
    smallest = comparison["smallest_difference"]["unweighted_average"]
    if smallest is not None:
        sentences.append(
            f"The smallest true difference that this test set would show (in four tests of five) is about "
            f"{percent(smallest)} points."
        )
    return sentences


def smallest_differences(comparison: dict[str, Any]) -> str:
    """What this test set can show, on every measure, as one sentence; empty when it could not be estimated."""
    found = comparison["smallest_difference"]
    parts = [f"{percent(v)} points of the {name.replace('_', ' ')}" for name, v in found.items() if v is not None]
    if not parts:
        return ""
    share = f"{100 * comparison['power']:.0f} % of tests"
    return f"For the median pair of methods, this test set would show in {share} a true difference of {listed(parts)}."


def warnings(record: Record) -> list[Caution]:
    """Everything to beware of, the gravest first."""
    found = [*_unfinished(record), *_refused(record), *_recorded(record), *_views(record), *_coarse(record)]
    return found


def _every_run(record: Record) -> Iterator[tuple[System, Run]]:
    """All runs with the method that they belong to."""
    for system in record.systems:
        for run in system.runs:
            yield system, run


def _unfinished(record: Record) -> Iterator[Caution]:
    """Runs without results."""
    cases = tuple(
        f"{system.label}, seed {run.seed}: round {run.rounds_done} of {run.rounds_planned or '?'}"
        for system, run in _every_run(record)
        if run.results is None
    )
    if cases:
        yield Caution("Unfinished runs. Figures below are of what there is; --resume takes a run up again.", cases)


def _refused(record: Record) -> Iterator[Caution]:
    """Updates that the server turned away, those of one method and reason together."""
    places: dict[tuple[str, str], list[str]] = {}
    for system, run in _every_run(record):
        for refusal in run.refusals():
            place = f"{refusal.client} (round {refusal.round}, seed {refusal.seed})"
            places.setdefault((system.label, refusal.reason), []).append(place)
    if not places:
        return
    count = sum(map(len, places.values()))
    cases = tuple(f"{label}: {_some(where)}: {reason}" for (label, reason), where in places.items())
    yield Caution(f"{plural(count, 'update was', 'updates were')} refused and did not count.", cases)


def _some(items: list[str]) -> str:
    """The first items and the number of the others."""
    if len(items) <= MOST_PLACES:
        return listed(items)
    return f"{', '.join(items[:MOST_PLACES])} and {len(items) - MOST_PLACES:,} more"


def _recorded(record: Record) -> Iterator[Caution]:
    """Warnings that the runs themselves recorded, each once, with the methods that it is about.

    Runs record refused updates too; those are left to `_refused`, which knows their seed.
    """
    refused = {f"round {r.round}, {r.client}: {r.reason}" for _, run in _every_run(record) for r in run.refusals()}
    heard: dict[str, dict[str, None]] = {}
    for system in record.systems:
        for text in (system.results or {}).get("warnings", ()):
            if text not in refused:
                heard.setdefault(str(text), {})[system.label] = None
    for text, labels in heard.items():
        everywhere = len(labels) == len(record.systems)
        yield Caution(text if everywhere else f"{listed(list(labels))}: {text}")


def _views(record: Record) -> Iterator[Caution]:
    """Training on a fixed number of augmented views, which is not quite augmentation."""
    views = {system.label: system.runs[0].config.get("training", {}).get("augment_views") for system in record.systems}
    few = {label: count for label, count in views.items() if isinstance(count, int) and count > 0}
    if few:
        counts = listed([plural(count, "cached view") for count in sorted(set(few.values()))], "or")
        yield Caution(f"{listed(list(few))} trained on {counts} of each augmented image instead of new ones each time.")


def _coarse(record: Record) -> Iterator[Caution]:
    """Clients whose balanced accuracy hangs on single test images."""
    if record.roster is None:
        return
    cases = tuple(_coarse_cases(record.roster))
    if cases:
        yield Caution(
            f"One test image moves a client's balanced accuracy by {percent(COARSE, 0)} points or more.", cases
        )


def _coarse_cases(roster: Roster) -> Iterator[str]:
    """A line for each client with such a class: 1 / (classes present * images of the rarest one)."""
    for name, counts in zip(roster.clients, roster.counts["test"], strict=True):
        present = np.flatnonzero(counts)
        if not len(present):
            continue
        rarest = present[counts[present].argmin()]
        step = 1 / (len(present) * int(counts[rarest]))
        if step >= COARSE:
            images = plural(int(counts[rarest]), "test image")
            yield f"{name}: {images} of {roster.classes[rarest]}, worth {percent(step, 0)} points each"
