"""The tables of a report as plain rows of text, ready for any page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wardround.evaluation.predictions import pooled_metrics
from wardround.report import series, uploads
from wardround.report.reading import Record, Roster, System
from wardround.report.words import MISSING, duration, flat, percent, signed, size

METRICS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "auroc": "AUROC",
    "ece": "calibration error",
}
POOLED = ("accuracy", "balanced_accuracy", "auroc")
VALUES_SHOWN = 80
ARITHMETIC = ("precision", "memory_format", "compile", "threads")
OWNERS = ("shared", "local", "frozen")
PARAMETERS = (
    "Parameters of one client's model: shared ones travel, local ones stay at their client, both may train. Statistics "
    "of norms are not counted, and neither is an encoder's text side."
)
TIMES = "Time of one run, mean over seeds. Training and evaluation are summed over clients; the total is by the clock."


@dataclass(frozen=True)
class Grid:
    """A table: headings, and rows whose first cell names the row; an empty one goes on under the name above."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    label: str = ""

    @property
    def spans(self) -> tuple[int, ...]:
        """How many rows each row's name covers; 0 for a row that goes on."""
        named = [i for i, row in enumerate(self.rows) if row[0]]
        ends = dict(zip(named, [*named[1:], len(self.rows)], strict=True))
        return tuple(ends[i] - i if i in ends else 0 for i in range(len(self.rows)))


def sizes(roster: Roster) -> Grid:
    """Images per client and split, and per class over all splits."""
    total = np.sum(list(roster.counts.values()), axis=0)
    splits = {split: counts.sum(1) for split, counts in roster.counts.items()}
    rows = tuple(
        (name, *(f"{splits[s][k]:,}" for s in splits), *(f"{n:,}" for n in total[k]))
        for k, name in enumerate(roster.clients)
    )
    return Grid(("client", *splits, *roster.classes), rows, "Images per split, then per class over all splits.")


def served(record: Record) -> Grid | None:
    """The server's model beside the personalised ones: three rows a method, None when no method shares a model."""
    done = [s.results for s in record.systems if s.results and s.results.get("global")]
    if not done:
        return None
    clients = list(done[0]["clients"])
    rows = [row for results in done for row in _served_rows(results, clients)]
    return Grid(
        ("method", "model", *clients, "weighted avg.", "unweighted avg."),
        tuple(rows),
        f"Balanced accuracy in percent{_over(done[0])}. The server's model carries each client's own local parts, "
        "where the method has any.",
    )


def held_out(record: Record) -> Grid | None:
    """What is shared alone, at sites that never trained: a row a method and site; None without such sites."""
    done = [system.results for system in record.systems if system.results and system.results.get("held_out")]
    rows = tuple(
        (results["label"] if first else "", name, f"{site['n_test']:,}", *_figures(site))
        for results in done
        for first, (name, site) in _numbered(results["held_out"])
    )
    if not rows:
        return None
    over = _over(done[0])
    caption = (
        f"What is shared, without any client's own parts, on all images of sites that never trained; in percent{over}. "
        "Methods whose shared part cannot predict alone are left out."
    )
    return Grid(("method", "site", "images", *METRICS.values()), rows, caption)


def _numbered(entries: dict[str, Any]) -> list[tuple[bool, tuple[str, Any]]]:
    """Each entry, and whether it is the first."""
    return [(i == 0, entry) for i, entry in enumerate(entries.items())]


def _figures(entry: dict[str, Any]) -> list[str]:
    """Every metric of a client or site, in percent, mean over seeds."""
    return [percent(_mean(entry[metric])) for metric in METRICS]


def overview(record: Record) -> Grid | None:
    """Accuracy, balanced accuracy and AUROC a method, as a mean over clients and over all test images in one pool."""
    done = [system for system in record.systems if system.results]
    if not done:
        return None
    rows = tuple((system.label, *map(percent, _means_and_pooled(system))) for system in done)
    headings = [f"{METRICS[name]}, {how}" for name in POOLED for how in ("mean", "pooled")]
    caption = (
        "Personal models on test images, in percent"
        f"{_over(done[0].results or {})}: mean over clients, and of all clients' images in one pool."
    )
    return Grid(("method", *headings, METRICS["ece"]), rows, caption)


def _means_and_pooled(system: System) -> list[float | None]:
    """For each metric of `POOLED` the mean over clients and the pooled figure, then the mean calibration error."""
    assert system.results is not None
    clients = system.results["clients"].values()
    pools = [pooled_metrics(run.folder) for run in system.runs if run.seed in system.results["seeds"]]
    means = {name: _mean([_mean(client[name]) for client in clients]) for name in (*POOLED, "ece")}
    both = [(means[name], _mean([pool.get(name) for pool in pools])) for name in POOLED]
    return [*(value for pair in both for value in pair), means["ece"]]


def _served_rows(results: dict[str, Any], clients: Sequence[str]) -> list[tuple[str, ...]]:
    """Personal, server's and their difference."""
    averages = ("weighted_average", "unweighted_average")

    def figures(part: dict[str, Any]) -> list[float | None]:
        scores = [part["clients"][name]["balanced_accuracy"] for name in clients]
        return [_mean(values) for values in scores] + [part["summary"][name]["mean"] for name in averages]

    own, theirs = figures(results), figures(results["global"])
    gaps = [None if a is None or b is None else a - b for a, b in zip(own, theirs, strict=True)]
    return [
        (results["label"], "personal", *map(percent, own)),
        ("", "server's", *map(percent, theirs)),
        ("", "personal − server's", *map(signed, gaps)),
    ]


def _over(results: dict[str, Any]) -> str:
    """The words "mean over 3 seeds" after a comma, where there are several seeds."""
    return f", mean over {len(results['seeds'])} seeds" if len(results["seeds"]) > 1 else ""


def _mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are defined."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def all_metrics(system: System) -> Grid | None:
    """Every metric of one method's personal models, a row a client, mean over seeds."""
    if system.results is None:
        return None
    rows = tuple(
        (
            name,
            f"{client['n_train']:,}",
            f"{client['n_test']:,}",
            *_figures(client),
            " / ".join(str(n) for n in client["support"]),
        )
        for name, client in system.results["clients"].items()
    )
    headings = ("client", "train", "test", *METRICS.values(), "test images per class")
    over = _over(system.results)
    return Grid(headings, rows, f"Personal models on test images, in percent{over}.", system.label)


def pairs(comparison: dict[str, Any]) -> Grid:
    """Each method against the reference: difference, interval and corrected p for each measure, and the verdict."""
    measures = comparison["measures"]

    def cell(found: dict[str, Any]) -> str:
        return f"{signed(found['difference'])} [{signed(found['low'])}, {signed(found['high'])}]"

    rows = tuple(
        (
            pair["method"],
            *(cell(pair["measures"][name]) for name in measures),
            _p(pair["measures"][measures[0]]["p_holm"]),
            _p(pair["wilcoxon"]["p_holm"]),
            percent(pair["measures"][measures[0]]["smallest_difference"]),
            pair["verdict"],
        )
        for pair in comparison["pairs"]
    )
    names = [name.replace("_", " ") for name in measures]
    headings = ("method", *names, "p", "Wilcoxon p", "smallest difference", "verdict")
    return Grid(
        headings,
        rows,
        f"Method minus {comparison['reference']}, in points of balanced accuracy, with "
        f"{100 * comparison['level']:.0f} % intervals from {comparison['draws']:,} paired resamples of seeds and "
        f"test images. p is Holm-corrected over the methods and belongs, like the smallest difference and the "
        f"verdict, to the {names[0]}.",
    )


def _p(value: float) -> str:
    """A p-value with two leading digits."""
    return "< 0.001" if value < 0.001 else f"{value:.2g}"


def own_intervals(comparison: dict[str, Any]) -> Grid:
    """Each method's balanced accuracy at each client with its interval."""
    methods = comparison["methods"]
    clients = list(next(iter(methods.values()))["clients"])

    def cell(found: dict[str, float]) -> str:
        return f"{percent(found['value'])} [{percent(found['low'])}, {percent(found['high'])}]"

    rows = tuple((label, *(cell(found["clients"][name]) for name in clients)) for label, found in methods.items())
    return Grid(("method", *clients), rows, "Balanced accuracy in percent with its interval, method by method.")


def every_pair(comparison: dict[str, Any]) -> Grid:
    """Row minus column for all pairs, on the first measure, with uncorrected intervals."""
    matrix, labels = comparison["matrix"][comparison["measures"][0]], comparison["matrix"]["labels"]

    def cell(i: int, j: int) -> str:
        values = (matrix[key][i][j] for key in ("difference", "low", "high"))
        return MISSING if i == j else "{} [{}, {}]".format(*map(signed, values))

    every = range(len(labels))
    rows = tuple((label, *(cell(i, j) for j in every)) for i, label in enumerate(labels))
    return Grid(("row − column", *labels), rows, "All pairs, in points of the unweighted average; not corrected.")


def skew_p_values(skew: dict[str, Any]) -> Grid:
    """The two-sample p-value of every two clients' features."""
    clients, feature = skew["clients"], skew["feature"]
    rows = tuple(
        (name, *(MISSING if value is None else _p(value) for value in values))
        for name, values in zip(clients, feature["p_values"], strict=True)
    )
    caption = f"p-values of the two-sample test on features, from {feature['permutations']:,} permutations."
    return Grid(("client", *clients), rows, caption)


def trained(found: dict[str, Any]) -> Grid:
    """Mean distance between the clients' features before and after training, a row a method."""
    rows = tuple(
        (system["label"], *_change(system["change"]), *_change(system["same_labels_change"]))
        for system in found["systems"]
    )
    headings = ("method", "before", "after", "nearer", "equal labels, before", "equal labels, after", "nearer")
    caption = (
        f"Mean MMD over pairs of clients, features of each client's {found['split']} images by its own network "
        f"({found['model']} model); on the right at equal labels."
    )
    return Grid(headings, rows, caption)


def _change(change: dict[str, Any]) -> tuple[str, str, str]:
    """Mean before, mean after, and how many pairs came nearer."""
    before, after = (MISSING if change[when] is None else f"{change[when]:.3f}" for when in ("before", "after"))
    return before, after, f"{change['nearer']} of {change['pairs']} pairs"


def communication(record: Record) -> Grid | None:
    """Bytes, elements and numbers of the model, a row a method (mean over seeds)."""
    done = [system for system in record.systems if system.results]
    numbers = [uploads.numbers_up(system.results or {}) for system in done]
    unit = uploads.unit_of(zip((system.method for system in done), numbers, strict=True))
    rows = tuple(
        (*_traffic(system), uploads.counted(up), *([uploads.times(up, unit)] if unit else []))
        for system, up in zip(done, numbers, strict=True)
    )
    headings = (
        "method", "up, a client and round", "down, a client and round", "up, whole run", "down, whole run",
        "shared elements", "statistic elements", uploads.NUMBERS_UP, *([uploads.TIMES] if unit else []),
    )  # fmt: skip
    caption = f"Length of the encoded messages; elements are those of one client's message. {uploads.EXPLANATION}"
    return Grid(headings, rows, caption) if rows else None


def _traffic(system: System) -> tuple[str, ...]:
    """The cells of one method that say what travelled."""
    assert system.results is not None
    found, visits = system.results["communication"], client_rounds(system)
    each = [size(found[key] / visits) if visits else MISSING for key in ("bytes_up", "bytes_down")]
    totals = [size(found[key]) for key in ("bytes_up", "bytes_down")]
    elements = [f"{found[key]:,}" for key in ("shared_elements", "statistic_elements")]
    return (system.label, *each, *totals, *elements)


def client_rounds(system: System) -> float:
    """Client-rounds with an upload in one run, mean over seeds."""
    ups = [{(m["round"], m["client"]) for m in run.messages if m["direction"] == "up"} for run in system.runs]
    return float(np.mean([len(found) for found in ups])) if ups else 0.0


def parameters(record: Record) -> Grid | None:
    """How many parameters are whose, a row a method; None where no run has counted them."""
    found = {s.label: s.results["parameters"] for s in record.systems if s.results and s.results.get("parameters")}
    rows = tuple(
        (label, *(f"{count:,}" for count in (counts["shared"] + counts["local"], *(counts[of] for of in OWNERS))))
        for label, counts in found.items()
    )
    return Grid(("method", "trainable", *OWNERS), rows, PARAMETERS) if rows else None


def client_traffic(system: System) -> Grid | None:
    """Bytes of each client over one run, mean over seeds."""
    found = series.bytes_by_client(system)
    rows = tuple((client, size(up), size(down)) for client, (up, down) in found.items())
    return Grid(("client", "up", "down"), rows, "Bytes over a whole run.", system.label) if rows else None


def times(record: Record) -> Grid | None:
    """Time of one run, a row a method (mean over seeds)."""
    found = {s.label: s.results["seconds"] for s in record.systems if s.results}
    phases = list(dict.fromkeys(phase for spans in found.values() for phase in spans))
    rows = tuple((label, *(duration(spans.get(p)) for p in phases)) for label, spans in found.items())
    return Grid(("method", *phases), rows, TIMES) if rows else None


def differing_options(record: Record) -> Grid | None:
    """The keys that methods share but set differently; None for a single method or no such key."""
    configs = {s.label: dict(flat({**s.runs[0].config, "seed": None})) for s in record.systems}
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    values = {key: [_value(config[key]) if key in config else MISSING for config in configs.values()] for key in keys}
    rows = tuple((key, *found) for key, found in values.items() if len({*found} - {MISSING}) > 1)
    return Grid(("key", *configs), rows) if rows else None


def _value(value: object) -> str:
    """A configuration value as TOML would nearly have it, cut when long."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= VALUES_SHOWN else text[: VALUES_SHOWN - 1] + "…"


def environment(record: Record) -> Grid | None:
    """What the first run recorded of the machine and the software, and which arithmetic it chose."""
    run = record.systems[0].runs[0]
    training = run.config.get("training", {})
    chosen = {f"training.{key}": training[key] for key in ARITHMETIC if key in training}
    found = {**dict(flat(run.environment)), **chosen}
    rows = tuple((key, _value(value)) for key, value in found.items())
    return Grid(("item", "value"), rows) if rows else None


def rerun(record: Record) -> list[str]:
    """Commands that repeat every run from its own complete configuration, into new folders."""
    root = record.folder.name
    commands = []
    for system in record.systems:
        for run in system.runs:
            inside = run.folder.relative_to(record.folder)
            config, out = f"{root}/{inside}/config.toml", f"{root}-again/{inside}"
            if record.kind == "run":
                config, out = f"{root}/config.toml", f"{root}-again"
            commands.append(f"wardround run {shlex.quote(config)} --out {shlex.quote(out)}")
    return [*commands, f"wardround report {shlex.quote(root + '-again')}"]
