"""A run folder or a compare folder as small dataclasses, whatever state it is in.

A run that was killed, a client whose update was refused and a file that an experiment did not need are ordinary;
only a folder that is neither kind, and a file that cannot be what it is called, are errors.
"""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.errors import InputError
from wardround.evaluation.results import merge_results
from wardround.report.images import file_name

Scores = dict[str, Any]
"""METRICS of one model on one split: `balanced_accuracy`, `confusion`, ...; None where undefined."""


@dataclass(frozen=True)
class Roster:
    """`federation.json`: who takes part, with how many images of which class.

    Attributes:
        counts: for each split, images per client and class `(clients, classes)`.
    """

    source: str
    classes: tuple[str, ...]
    clients: tuple[str, ...]
    counts: dict[str, NDArray[np.int64]]
    modalities: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """An update that the server turned away."""

    seed: int
    round: int
    client: str
    reason: str


@dataclass(frozen=True)
class Run:
    """One method with one seed.

    Attributes:
        lines: the client lines of `metrics.jsonl` by (round, client).
        server: the server's values by round.
        messages: the lines of `messages.jsonl`.
        results: None for an unfinished run.
    """

    folder: Path
    seed: int
    config: dict[str, Any]
    config_text: str
    lines: dict[tuple[int, str], dict[str, Any]]
    server: dict[int, dict[str, float]]
    messages: tuple[dict[str, Any], ...]
    results: dict[str, Any] | None
    environment: dict[str, Any]

    @property
    def rounds_done(self) -> int:
        """The last round that left a trace."""
        return max([*(round for round, _ in self.lines), *self.server], default=0)

    @property
    def rounds_planned(self) -> int | None:
        """The number of rounds that the configuration asks for."""
        planned = self.config.get("rounds")
        return planned if isinstance(planned, int) else None

    def refusals(self) -> list[Refusal]:
        """Refused updates in the order of the rounds."""
        return [
            Refusal(self.seed, round, client, str(line["refused"]))
            for (round, client), line in sorted(self.lines.items())
            if line.get("refused")
        ]

    def scores(self, which: str, split: str) -> Iterator[tuple[int, str, Scores]]:
        """(round, client, METRICS) wherever the model `which` ("personal" or "received") was evaluated on `split`.

        For "received" the round is the one in which the server's model was aggregated.
        """
        for (round, client), line in sorted(self.lines.items()):
            found = line.get(which) or {}
            if found.get(split):
                yield int(found.get("round", round)), client, found[split]


@dataclass(frozen=True)
class System:
    """One method over all its seeds, under the label that tables give it.

    Attributes:
        results: merged over seeds; None when no run has finished.
    """

    label: str
    method: str
    runs: tuple[Run, ...]
    results: dict[str, Any] | None


@dataclass(frozen=True)
class Record:
    """All that a report is written from.

    Attributes:
        kind: "run" or "compare".
        samples: contact sheet by client.
        command: what was typed to make a comparison.
    """

    folder: Path
    kind: str
    roster: Roster | None
    systems: tuple[System, ...]
    comparison: dict[str, Any] | None = None
    skew: dict[str, Any] | None = None
    trained: dict[str, Any] | None = None
    samples: dict[str, Path] = field(default_factory=dict)
    command: str | None = None

    @property
    def clients(self) -> tuple[str, ...]:
        """Client names in the federation's order; without `federation.json`, in that of the metrics."""
        if self.roster:
            return self.roster.clients
        names = (client for system in self.systems for run in system.runs for _, client in run.lines)
        return tuple(dict.fromkeys(names))


def load(folder: Path) -> Record:
    """Read `folder`, which one run or one comparison of several has written.

    Raises:
        InputError: it is neither, or one of its files is damaged (the message names the file and the line).
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder")
    if is_run(folder):
        return _record(folder, "run", (_system([_run(folder)]),))
    methods: dict[Path, list[Run]] = {}
    for path in sorted(folder.glob("*/seed-*")):
        if is_run(path):
            methods.setdefault(path.parent, []).append(_run(path))
    if not methods:
        raise InputError(
            f"{folder}: neither a run (it would hold config.toml and metrics.jsonl) nor a comparison (it would "
            "hold METHOD/seed-NUMBER folders, each a run)"
        )
    return _record(folder, "compare", _in_order(folder, [_system(runs, home) for home, runs in methods.items()]))


def _in_order(folder: Path, systems: list[System]) -> tuple[System, ...]:
    """The order in which the comparison names the methods; before it is made, that of the labels."""
    comparison = _optional_object(folder / "comparison.json") or {"methods": ()}
    place = {label: i for i, label in enumerate(comparison["methods"])}
    return tuple(sorted(systems, key=lambda system: (place.get(system.label, len(place)), system.label)))


def is_run(folder: Path) -> bool:
    """Whether `folder` is what one run writes, however early it ended."""
    return any((folder / name).is_file() for name in ("metrics.jsonl", "messages.jsonl", "environment.json"))


def _record(folder: Path, kind: str, systems: tuple[System, ...]) -> Record:
    """The record of `folder`; files that all runs share may lie in it or in its first run."""
    homes = [folder, *(run.folder for system in systems for run in system.runs)]
    roster = next(filter(None, (_roster(home / "federation.json") for home in homes)), None)
    return Record(
        folder=folder,
        kind=kind,
        roster=roster,
        systems=systems,
        comparison=_optional_object(folder / "comparison.json"),
        skew=_optional_object(folder / "skew" / "skew.json"),
        trained=_optional_object(folder / "skew" / "trained.json"),
        samples=next(filter(None, (_samples(home, roster) for home in homes)), {}),
        command=typed.read_text(encoding="utf-8").strip() if (typed := folder / "command.txt").is_file() else None,
    )


def _samples(folder: Path, roster: Roster | None) -> dict[str, Path]:
    """The contact sheets that exist, by client."""
    sheets = {name: folder / "samples" / file_name(name) for name in (roster.clients if roster else ())}
    return {name: path for name, path in sheets.items() if path.is_file()}


def _system(runs: list[Run], home: Path | None = None) -> System:
    """One method from its runs; `home/results.json` is preferred, and what is missing there is merged anew."""
    ordered = sorted(runs, key=lambda run: run.seed)
    finished = [run.results for run in ordered if run.results is not None]
    merged = _optional_object(home / "results.json") if home else None
    results = merged or (merge_results(finished) if finished else None)
    method = str(ordered[0].config.get("method", {}).get("name", ordered[0].folder.name))
    known = results or {"label": home.name if home else method, "method": method}
    return System(known["label"], known["method"], tuple(ordered), results)


def _run(folder: Path) -> Run:
    """Read one run folder; every file in it may be missing."""
    config_text, config = _config(folder / "config.toml")
    results = _optional_object(folder / "results.json")
    lines, server = _metrics(folder / "metrics.jsonl")
    return Run(
        folder=folder,
        seed=_seed(folder, config, results),
        config=config,
        config_text=config_text,
        lines=lines,
        server=server,
        messages=tuple(_json_lines(folder / "messages.jsonl")),
        results=results,
        environment=_optional_object(folder / "environment.json") or {},
    )


def _seed(folder: Path, config: dict[str, Any], results: dict[str, Any] | None) -> int:
    """The run's seed: what its results say, else its configuration, else its folder's name."""
    if results is not None:
        return int(results["seeds"][0])
    named = re.search(r"(\d+)$", folder.name)
    stated = config.get("seed")
    return int(stated if isinstance(stated, int) else named[1] if named else 0)


def _config(path: Path) -> tuple[str, dict[str, Any]]:
    """The text and the content of `config.toml`; both empty when there is none."""
    if not path.is_file():
        return "", {}
    text = path.read_text(encoding="utf-8")
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not a TOML file: {error}") from None


def _metrics(path: Path) -> tuple[dict[tuple[int, str], dict[str, Any]], dict[int, dict[str, float]]]:
    """Client lines by (round, client) and the server's values by round.

    A round that was done again after a crash, or a model that was evaluated later, has more than one line: what a
    later line knows replaces what an earlier one said.
    """
    lines: dict[tuple[int, str], dict[str, Any]] = {}
    server: dict[int, dict[str, float]] = {}
    for line in _json_lines(path):
        if "client" in line:
            known = {key: value for key, value in line.items() if value not in (None, {})}
            lines.setdefault((int(line["round"]), str(line["client"])), {}).update(known)
        elif "server" in line:
            server.setdefault(int(line["round"]), {}).update(line["server"] or {})
    return lines, server


def _roster(path: Path) -> Roster | None:
    """`federation.json`, or None when there is none."""
    document = _optional_object(path)
    if document is None:
        return None
    clients = document["clients"]
    counts = {
        split: np.array([client["counts"][split] for client in clients], dtype=np.int64)
        for split in ("train", "val", "test")
    }
    return Roster(
        source=document["source"],
        classes=tuple(document["classes"]),
        clients=tuple(client["name"] for client in clients),
        counts=counts,
        modalities=tuple(document.get("modalities", ())),
        notes=tuple(document.get("notes", ())),
    )


def _optional_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, or None when there is no such file."""
    if not path.is_file():
        return None
    return _parse(path, path.read_text(encoding="utf-8"))


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one a line; a last line that a killed run left half written is passed over."""
    if not path.is_file():
        return
    *whole, rest = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(whole, 1):
        if line.strip():
            yield _parse(path, line, f", line {number}")
    with contextlib.suppress(InputError):
        yield _parse(path, rest)


def _parse(path: Path, text: str, place: str = "") -> dict[str, Any]:
    """One JSON object; InputError when `text` is anything else."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}{place}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}{place}: expected a JSON object, found {type(found).__name__}")
    return found
