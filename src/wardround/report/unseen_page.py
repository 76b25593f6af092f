"""The tables of what a federation knows of a modality that it never saw, and their page in Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wardround.evaluation.tables import MISSING, Cell, Column, Row, Table, spread_cell, with_ranks
from wardround.report.markdown import ranked
from wardround.report.words import signed

Record = dict[str, Any]  # `unseen.json`

TITLE = "A modality that the federation never saw"
WORDS = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy"}
KINDS = {"federation": "from the federation", "scratch": "from scratch", "difference": "difference"}
COUNTED = {"used": "trained on", "pool": "of", "test": "tested on"}
COLUMNS = tuple(
    Column(f"{figure}, {words}", ranked=kind == "federation")
    for figure in WORDS.values()
    for kind, words in KINDS.items()
)


def unseen_tables(record: Record) -> list[Table]:
    """How well each modality is learned, and from which images; none before anything has finished."""
    done = [part for part in record["modalities"] if part["systems"]]
    return [_quality(record, done), _images(done)] if done else []


def unseen_markdown(record: Record) -> str:
    """`unseen.md`."""
    lead = (
        "Does what a federation has learned help with a kind of images that it never had? After: FM²: a federated "
        "medical multimodal foundation model (2026), Sec. 4, generalisation."
    )
    parts = [f"# {TITLE}", lead, *([f"    {record['command']}"] if record["command"] else [])]
    parts += [ranked(table) for table in unseen_tables(record)] or ["Nothing has finished yet."]
    return "\n\n".join(parts) + "\n"


def _quality(record: Record, done: list[Record]) -> Table:
    """A row a modality and method; ranks are those within a modality."""
    rows = [row for part in done for row in _ranked_part(part)]
    counts = sorted({len(system["seeds"]) for part in done for system in part["systems"]})
    spread = "one seed" if counts == [1] else f"mean ± standard deviation over {' or '.join(map(str, counts))} seeds"
    caption = (
        f"In percent, {spread}, on all test images of the modality that the federation never had, after "
        f"{record['epochs']} epochs on {100 * record['fraction']:g} % of its training images. From scratch: the same "
        "network on the same images in the same order, from the experiment's initial weights. Differences in points, "
        "within each seed."
    )
    return Table(TITLE, COLUMNS, tuple(rows), caption, "left out: method")


def _ranked_part(part: Record) -> list[Row]:
    """The rows of one modality; one system alone has no rank."""
    rows = [Row(f"{part['modality']}: {system['label']}", tuple(_cells(system))) for system in part["systems"]]
    return with_ranks(rows, COLUMNS) if len(rows) > 1 else rows


def _cells(system: Record) -> Iterator[Cell]:
    several = len(system["seeds"]) > 1
    for figure in WORDS:
        for kind in KINDS:
            spread = system[kind][figure]
            yield _difference(spread, several) if kind == "difference" else spread_cell(spread, 100.0, several)


def _difference(spread: Record, several: bool) -> Cell:
    """In points, with its sign."""
    if spread["mean"] is None:
        return Cell(MISSING, None, None)
    text = signed(spread["mean"]) + (f" ± {100 * spread['std']:.1f}" if several else "")
    return Cell(text, spread["mean"], spread["std"])


def _images(done: list[Record]) -> Table:
    """A row a modality and class: images used, there to choose from, and tested."""
    rows = tuple(
        Row(f"{part['modality']}: {label}", tuple(_counted(part["images"], kind, label) for kind in COUNTED))
        for part in done
        for label in _classes(part["images"])
    )
    columns = tuple(Column(heading, ranked=False) for heading in COUNTED.values())
    return Table("Images of each class", columns, rows, "A range where seeds differ.", "left out: class")


def _classes(images: Record) -> list[str]:
    """Those of any seed, in their order."""
    return list(dict.fromkeys(label for by_seed in images.values() for label in by_seed["used"]))


def _counted(images: Record, kind: str, label: str) -> Cell:
    found = [by_seed[kind].get(label, 0) for by_seed in images.values()]
    low, high = min(found), max(found)
    return Cell(f"{low:,}" if low == high else f"{low:,} to {high:,}", None, None)
