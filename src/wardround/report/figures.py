"""The figures of a report, each with its caption, from what the folder holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wardround.report import heatmaps, plots, series
from wardround.report.calibration import reliability_diagram
from wardround.report.plots import Dot, Series
from wardround.report.reading import Record, Roster, System
from wardround.report.svg import MARKERS

MOST_PANELS = 24
MOST_DIAGNOSTICS = 12
EPOCH = "local epoch"
EPOCHS = (
    "Local epochs are a client's passes over its training images, whatever part of the model each trains: some methods "
    "make more than one a round."
)

KNOWN_LOGS = {
    "train_loss": "Training loss",
    "alignment_loss": "Alignment loss",
    "alignment_gradient_ratio": "Alignment gradient ÷ task gradient",
    "statistic_distance": "Distance of clients' statistics",
}


@dataclass(frozen=True)
class Key:
    """One entry of a legend: a label with the number of its colour and marker, and of its dash pattern."""

    label: str
    look: int
    dash: int = 0


@dataclass(frozen=True)
class Figure:
    """One drawing with its name."""

    label: str
    svg: str


@dataclass(frozen=True)
class Bars:
    """Stacked bars with the names of their parts."""

    svg: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Panels:
    """Small charts side by side under one heading, with one legend."""

    heading: str
    charts: tuple[str, ...]
    keys: tuple[Key, ...]
    note: str = ""


MODELS = {
    ("personal", "test"): Key("personal model, test", 0),
    ("received", "test"): Key("server's model, test", 1),
    ("personal", "val"): Key("personal model, validation", 0, 1),
    ("received", "val"): Key("server's model, validation", 1, 1),
}


CONVERGENCE = {"accuracy": "Accuracy", "balanced_accuracy": "Balanced accuracy"}


def convergence(record: Record) -> Panels | None:
    """Means over clients of the personal models' figures on test images, over local epochs: a line a method."""
    found = {title: convergence_lines(record, metric) for metric, title in CONVERGENCE.items()}
    shown = {title: lines for title, lines in found.items() if lines}
    charts = [plots.curves(title, lines, " %", over=EPOCH) for title, lines in shown.items()]
    keys = {line.label: Key(line.label, line.look, line.dash) for lines in shown.values() for line in lines}
    return Panels("Mean over clients", tuple(charts), tuple(keys.values()), EPOCHS) if charts else None


def convergence_lines(record: Record, metric: str) -> list[Series]:
    """One line a method that has been evaluated, over local epochs."""
    lines = [series.convergence_curve(s, metric, s.label, look) for look, s in enumerate(record.systems)]
    return [line for line in lines if line.y]


def by_method(record: Record) -> Panels | None:
    """Balanced accuracy of the personal models on test images: a panel a client, a line a method."""
    keys = [Key(system.label, look, look // len(MARKERS)) for look, system in enumerate(record.systems)]

    def panel(client: str) -> list[Series]:
        pairs = zip(record.systems, keys, strict=True)
        lines = [series.convergence_curve(s, "balanced_accuracy", k.label, k.look, client) for s, k in pairs]
        return [line for line in lines if line.y]

    return _client_panels("Personal models on test images", record, panel, keys, EPOCH)


def by_model(record: Record, system: System) -> Panels | None:
    """One method's personal and received models on test and validation images: a panel a client."""

    def panel(client: str) -> list[Series]:
        lines = [
            series.accuracy_curve(system, client, which, split, key.label, key.look, key.dash)
            for (which, split), key in MODELS.items()
        ]
        return [line for line in lines if line.y]

    return _client_panels(system.label, record, panel, list(MODELS.values()))


def _client_panels(heading: str, record: Record, panel: Any, keys: Sequence[Key], over: str = "round") -> Panels | None:
    """One chart for each client, all with the same range; None when nothing was evaluated."""
    shown = record.clients[:MOST_PANELS]
    lines = [panel(client) for client in shown]
    limits = plots.common_limits(lines)
    if limits is None:
        return None
    limits = (max(0.0, limits[0]), min(102.0, limits[1]))
    pairs = [(client, one) for client, one in zip(shown, lines, strict=True) if one]
    charts = [plots.curves(client, one, " %", limits=limits, over=over) for client, one in pairs]
    drawn = {line.label for one in lines for line in one}
    more = f"The first {len(shown)} of {len(record.clients)} clients." if record.clients != shown else ""
    return Panels(heading, tuple(charts), tuple(key for key in keys if key.label in drawn), more)


def diagnostics(record: Record) -> Panels | None:
    """Every number that was logged, a panel each: a line a client within one run, a line a method otherwise."""
    names = ["train_loss", *series.logged_names(record.systems)][:MOST_DIAGNOSTICS]
    lines = {name: list(_log_lines(record, name)) for name in names}
    charts = [plots.curves(_log_title(name), found, log=_wide(found)) for name, found in lines.items() if found]
    keys = {line.label: Key(line.label, line.look) for found in lines.values() for line in found}
    return Panels("Diagnostics", tuple(charts), tuple(keys.values())) if charts else None


def _log_title(name: str) -> str:
    """What a logged number is called; a suffix after "/" says for which place in the network it is."""
    base, _, place = name.partition("/")
    known = KNOWN_LOGS.get(base, base.replace("_", " "))
    return f"{known}, site {place}" if place else known


def _log_lines(record: Record, name: str) -> Iterator[Series]:
    """The lines of one logged number."""
    if record.kind == "compare":
        for look, system in enumerate(record.systems):
            points = [p for run in system.runs for p in series.client_log(run, name) or series.server_log(run, name)]
            if points:
                yield series.over_runs(system.label, points, look)
        return
    run = record.systems[0].runs[0]
    for look, client in enumerate(record.clients[:MOST_PANELS]):
        points = series.client_log(run, name, client)
        if points:
            yield series.over_runs(client, points, look)
    if points := series.server_log(run, name):
        yield series.over_runs("server", points, 7)


def _wide(found: Sequence[Series]) -> bool:
    """Whether values span more than a factor of 30, which a linear axis would flatten."""
    values = [y for line in found for y in line.y if y > 0]
    return bool(values) and max(values) > 30 * min(values)


def dots(record: Record) -> str | None:
    """Final balanced accuracy per client: of each method, or of one method's personal and server's models."""
    done = [system for system in record.systems if system.results is not None]
    if not done:
        return None
    clients = list((done[0].results or {})["clients"])
    if record.kind == "compare":
        rows = {system.label: _dots(system.results, clients) for system in record.systems}
    else:
        results = done[0].results or {}
        rows = {"personal models": _dots(results, clients)}
        if results.get("global"):
            rows["server's model"] = _dots(results["global"], clients)
    return plots.result_dots(clients, rows)


def dot_keys(record: Record) -> list[Key]:
    """The legend of `dots`."""
    if record.kind == "compare":
        return [Key(system.label, look) for look, system in enumerate(record.systems)]
    served = bool((record.systems[0].results or {}).get("global"))
    return [Key("personal models", 0), *([Key("server's model", 1)] if served else [])]


def _dots(results: dict[str, Any] | None, clients: Sequence[str]) -> list[Dot]:
    """One dot a client, empty where the figure is undefined or the method has not finished."""
    found = []
    for client in clients:
        values = results["clients"][client]["balanced_accuracy"] if results else []
        known = [100 * value for value in values if value is not None]
        spread = float(np.std(known, ddof=1)) if len(known) > 1 else 0.0
        found.append(Dot(float(np.mean(known)) if known else math.nan, spread))
    return found


def confusions(record: Record) -> list[Figure]:
    """One pooled confusion matrix a method."""
    if record.roster is None:
        return []
    found = {system.label: series.pooled_confusion(system) for system in record.systems}
    return [
        Figure(label, heatmaps.confusion_heatmap(label, record.roster.classes, np.array(matrix)))
        for label, matrix in found.items()
        if matrix
    ]


def reliabilities(record: Record) -> list[Figure]:
    """One pooled reliability diagram a method, over all seeds; none where predictions are not kept."""
    return [
        Figure(system.label, reliability_diagram(system.label, *bins))
        for system in record.systems
        if (bins := series.pooled_reliability(system)) is not None
    ]


def traffic(record: Record) -> Panels | None:
    """Megabytes per round: a line a method, or within one run a line a direction."""
    if record.kind == "compare":
        each = enumerate(record.systems)
        lines = [series.bytes_by_round(system, system.label, ("up", "down"), look) for look, system in each]
    else:
        ways = {"up": "clients to server", "down": "server to clients"}
        each_way = enumerate(ways.items())
        lines = [series.bytes_by_round(record.systems[0], text, (way,), look) for look, (way, text) in each_way]
    shown = [line for line in lines if line.y]
    if not shown:
        return None
    limits = (0.0, 1.1 * max(max(line.y) for line in shown))
    chart = plots.curves("MB per round, all clients", shown, " MB", limits=limits)
    return Panels("Bytes", (chart,), tuple(Key(line.label, line.look) for line in shown))


def seconds(record: Record) -> Bars | None:
    """Time of one run of each finished method, by phase; a total is no phase."""
    done = [system for system in record.systems if system.results is not None]
    phases: dict[str, list[float]] = {"setup": []}
    for system in done:
        for phase, value in (system.results or {})["seconds"].items():
            if phase != "total":
                phases.setdefault(phase, []).append(float(value or 0.0))
    whole = {phase: values for phase, values in phases.items() if len(values) == len(done)}
    if not done or not whole:
        return None
    return Bars(plots.seconds_bars([system.label for system in done], whole), tuple(whole))


def forest(comparison: dict[str, Any]) -> str | None:
    """Differences of the unweighted mean from the reference, with their intervals."""
    found = {
        pair["method"]: tuple(100 * pair["measures"]["unweighted_average"][k] for k in ("difference", "low", "high"))
        for pair in comparison["pairs"]
    }
    return plots.intervals(comparison["reference"], found) if found else None


def sizes(roster: Roster, most: int) -> str:
    """Images per client and split, for the first `most` clients."""
    splits = {split: counts.sum(1)[:most].tolist() for split, counts in roster.counts.items()}
    return plots.client_sizes(roster.clients[:most], splits)


def skew(found: dict[str, Any], most: int) -> list[Figure]:
    """How the first `most` clients differ pair by pair: in features, in labels, in concept."""
    clients = found["clients"][:most]

    def matrix(rows: list[list[float | None]]) -> heatmaps.Matrix:
        return np.array(rows, dtype=np.float64)[:most, :most]

    feature = found["feature"]
    kind = "MMD²" if feature["squared"] else "MMD"
    mmd = f"Features ({kind}, {feature['estimator']}, {feature['bandwidth']} bandwidth)"
    divergence = matrix(found["label"]["jensen_shannon"])
    disagreement = matrix(found["concept"]["disagreement"])
    return [
        Figure(mmd, heatmaps.mmd_heatmap(clients, matrix(feature["mmd"]))),
        Figure(
            "Labels (Jensen–Shannon divergence, bits)",
            heatmaps.pair_heatmap("Jensen-Shannon divergence of labels", clients, divergence),
        ),
        Figure(
            "Concept (disagreement on the same classes; the diagonal is chance)",
            heatmaps.pair_heatmap("concept disagreement", clients, disagreement),
        ),
    ]


def trained(found: dict[str, Any], most: int) -> list[Figure]:
    """Feature distances of the first `most` clients before and after training, method by method, on one scale."""
    clients = found["clients"][:most]
    maps = {
        f"{system['label']}, {when} training": np.array(system[when], dtype=np.float64)[:most, :most]
        for system in found["systems"]
        for when in ("before", "after")
    }
    highest = max((float(np.nanmax(values, initial=0.0)) for values in maps.values()), default=0.0)
    what = "maximum mean discrepancy of image features"
    return [
        Figure(label, heatmaps.pair_heatmap(f"{what} ({label})", clients, values, highest))
        for label, values in maps.items()
    ]
