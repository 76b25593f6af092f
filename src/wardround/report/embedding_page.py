"""How far groups of images lie apart by an embedding, as tables, and its page in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wardround.evaluation.tables import Cell, Column, Row, Table
from wardround.report.markdown import ranked
from wardround.report.words import MISSING

Record = Mapping[str, Any]  # `embedding.json`

FIGURES = {
    "silhouette": "silhouette",
    "picture_silhouette": "silhouette in the picture",
    "same_neighbours": "same neighbours, %",
    "by_chance": "by chance, %",
}
NAMES = {
    "features": "the backbone's pooled features",
    "domain": "the output X of the experts by modality",
    "mixtures": "the outputs of both mixtures, weighted and side by side",
}
EXPLANATION = (
    "Silhouette: near 1 where images of one group lie together and far from others, near 0 where groups interleave; of "
    "the features, and of what one sees. Same neighbours: of an image's ten nearest ones by features, the share of its "
    "own group. – where there are no two groups."
)


def embedding_tables(record: Record) -> list[Table]:
    """One table a representation: a row a run and way to group its images."""
    columns = tuple(Column(heading, ranked=False) for heading in FIGURES.values())
    return [
        Table(f"How far groups lie apart in {NAMES.get(name, name)}", columns, rows, EXPLANATION, corner="run")
        for name in representations(record)
        if (rows := tuple(_rows(record, name)))
    ]


def representations(record: Record) -> list[str]:
    """Their names, in the order in which they were found."""
    return list(dict.fromkeys(one["representation"] for one in record["maps"]))


def _rows(record: Record, representation: str) -> Iterator[Row]:
    for one in record["maps"]:
        for kind, found in one["figures"].items() if one["representation"] == representation else ():
            yield Row(f"{one['label']}, by {kind}", tuple(_cell(key, found[key]) for key in FIGURES))


def _cell(key: str, value: float | None) -> Cell:
    """Silhouettes as they are, shares in percent."""
    if value is None:
        return Cell(MISSING, None, None)
    text = f"{value:.3f}".replace("-", "−") if "silhouette" in key else f"{100 * value:.1f}"
    return Cell(text, value, None)


def embedding_markdown(record: Record, files: Sequence[Path], command: str) -> str:
    """`embedding.md`: the tables, each with its picture, and what to beware of."""
    images = f"{record['images']} test images, each by its own client's {record['model']} model."
    parts = ["# What the networks make of test images", images, f"    {command}"]
    for table, file, name in zip(embedding_tables(record), files, representations(record), strict=True):
        parts += [ranked(table), f"![t-SNE of {NAMES.get(name, name)}, a dot an image]({file.name})"]
    parts += ["## To beware of", "\n".join(f"- {note}" for note in record["notes"])]
    return "\n\n".join(parts) + "\n"
