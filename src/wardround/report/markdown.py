"""A comparison's tables as one Markdown page, for a repository, a paper's supplement or a code review."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from wardround.errors import InputError
from wardround.evaluation.tables import Table, results_table
from wardround.federation.files import write_atomically
from wardround.report import findings, sections
from wardround.report.reading import Record, load
from wardround.report.sections import Grid

STYLES = {1: "**{}**", 2: "*{}*", None: "{}"}


def write_markdown(folder: Path, file: Path) -> Path:
    """Write the tables of a run or a comparison to `file`.

    Args:
        folder: of a run or a comparison.
        file: the page; its folder is made when absent.

    Returns:
        `file`.

    Raises:
        InputError: `folder` is neither, or the page cannot be written.
    """
    text = render(load(folder))
    try:
        write_atomically(file, text.encode(), durable=False)
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error.strerror or error})") from error
    return file


def render(record: Record) -> str:
    """The page as text; a comparison's has the command that made it."""
    parts = [f"# {findings.title(record)}", " ".join(findings.summary(record))]
    parts += [f"    {record.command}"] if record.command else []
    for heading, blocks in _chapters(record):
        parts += [f"## {heading}", *blocks] if blocks else []
    return "\n\n".join(parts) + "\n"


def _chapters(record: Record) -> Iterator[tuple[str, list[str]]]:
    """Headings, each with its paragraphs and tables; those that have nothing to say are empty."""
    done = [system.results for system in record.systems if system.results]
    yield "Balanced accuracy", [ranked(results_table(done, model=kind)) for kind in ("personal", "global")]
    yield "Other measures", _grids(sections.overview(record))
    yield "Sites that never trained", _grids(sections.held_out(record))
    yield "Is it more than noise?", _noise(record)
    yield "Cost", _grids(sections.communication(record), sections.parameters(record), sections.times(record))
    yield "What differs between the systems", _grids(sections.differing_options(record))
    yield "To beware of", ["\n".join(_cautions(record))] if findings.warnings(record) else []
    yield "Where it ran", _grids(sections.environment(record))


def _noise(record: Record) -> list[str]:
    if record.comparison is None:
        return []
    said = [findings.smallest_differences(record.comparison)]
    tables = _grids(sections.pairs(record.comparison), sections.own_intervals(record.comparison))
    return [text for text in [*said, *tables] if text]


def _cautions(record: Record) -> Iterator[str]:
    for caution in findings.warnings(record):
        yield f"- {caution.headline}"
        yield from (f"  - {case}" for case in caution.cases)


def _grids(*grids: Grid | None) -> list[str]:
    """Each table, then its caption."""
    return [text for grid in grids if grid and grid.rows for text in (_table(grid.headings, grid.rows), grid.caption)]


def ranked(table: Table) -> str:
    """A table of results: the best figure of a column in bold, the second in italics."""
    rows = [[row.label, *(STYLES[cell.rank].format(cell.text) for cell in row.cells)] for row in table.rows]
    headings = [table.corner, *(column.heading for column in table.columns)]
    return f"{table.title}. {table.caption}\n\n{_table(headings, rows)}" if rows else ""


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in the pipe form; the first column is text, the others are figures."""
    ruler = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in (headings, ruler, *rows))


def _cell(text: str) -> str:
    """What may stand in a cell: on one line, without a bare bar."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))
