"""The table of results in the form of the PAFP paper (Table II), as plain data that any page can draw."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from wardround.errors import InputError
from wardround.evaluation.results import Results, Spread, merge_results, over_seeds, summarise

if TYPE_CHECKING:
    import rich.table

__all__ = ["Cell", "Column", "Row", "Table", "merge_results", "results_table", "summarise", "to_rich"]

ModelKind = Literal["personal", "global"]
MISSING = "–"


@dataclass(frozen=True)
class Column:
    """A column: its heading, the power of 100 that its fractions are shown in, which end is good, and whether it ranks.

    `scale` is 100 for a share in percent and 10,000 for a variance of percentages.
    """

    heading: str
    scale: float = 100.0
    higher_is_better: bool = True
    ranked: bool = True


@dataclass(frozen=True)
class Cell:
    """One figure. `mean` and `std` are fractions; `rank` is 1 for the best, 2 for the second, else `None`."""

    text: str
    mean: float | None
    std: float | None
    rank: int | None = None


@dataclass(frozen=True)
class Row:
    """One method. A row with `ranked` false (the isolated reference) stands apart and takes no rank."""

    label: str
    cells: tuple[Cell, ...]
    ranked: bool = True


@dataclass(frozen=True)
class Table:
    """Columns, rows in the order to show (those that stand apart first), what the figures are, what heads the rows."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    caption: str
    corner: str = "method"


SUMMARY_COLUMNS = {
    "weighted_average": Column("weighted avg."),
    "unweighted_average": Column("unweighted avg."),
    "inter_client_variance": Column("variance", scale=1e4, higher_is_better=False),
    "pooled_balanced_accuracy": Column("pooled"),
    "worst_client": Column("worst client"),
}


def results_table(
    results: Sequence[Results], *, model: ModelKind = "personal", apart: Collection[str] = ("isolated",)
) -> Table:
    """Balanced accuracy in percent: one row a method, one column a client, then the summary.

    The paper's columns are the clients, the weighted and the unweighted average and the inter-client
    variance; the pooled figure and the worst client follow them. Ranks go by the figures as shown, so that
    equal figures have equal ranks.

    Args:
        results: `results.json` of each method.
        model: the clients' personal models, or the server's model (methods that have none are left out).
        apart: methods (by name, not label) that train without federation.

    Raises:
        InputError: the results are not of the same clients.
    """
    shown = [result for result in results if model == "personal" or result.get("global") is not None]
    clients = _common_clients(shown)
    columns = (*(Column(name) for name in clients), *SUMMARY_COLUMNS.values())
    rows = [_row(result, model, clients, result["method"] not in apart) for result in shown]
    rows.sort(key=lambda row: row.ranked)
    seeds = sorted({len(result["seeds"]) for result in shown})
    return Table(_title(model), columns, tuple(with_ranks(rows, columns)), _caption(seeds))


def _common_clients(results: Sequence[Results]) -> tuple[str, ...]:
    """The clients' names; InputError where two results differ in them."""
    names = [tuple(result["clients"]) for result in results]
    for result, found in zip(results, names, strict=True):
        if set(found) != set(names[0]):
            raise InputError(
                f"{result['label']!r} has clients {sorted(found)}, but {results[0]['label']!r} has "
                f"{sorted(names[0])}: only results of one federation fit in a table"
            )
    return names[0] if names else ()


def _row(result: Results, model: ModelKind, clients: Sequence[str], ranked: bool) -> Row:
    """A row without ranks."""
    part = result if model == "personal" else result["global"]
    several = len(result["seeds"]) > 1
    spreads = [over_seeds(part["clients"][name]["balanced_accuracy"]) for name in clients]
    cells = [spread_cell(spread, 100.0, several) for spread in spreads]
    cells += [spread_cell(part["summary"][key], column.scale, several) for key, column in SUMMARY_COLUMNS.items()]
    return Row(result["label"], tuple(cells), ranked)


def spread_cell(spread: Spread, scale: float, several: bool) -> Cell:
    """`mean ± std`, or the mean alone for one seed, whose spread nobody knows."""
    mean, std = spread["mean"], spread["std"]
    if mean is None or std is None:
        return Cell(MISSING, None, None)
    text = f"{scale * mean:.1f} ± {scale * std:.1f}" if several else f"{scale * mean:.1f}"
    return Cell(text, mean, std)


def with_ranks(rows: Sequence[Row], columns: Sequence[Column]) -> list[Row]:
    """The rows, with ranks 1 and 2 in each column among those that are ranked."""
    ranks = [_ranks([row.cells[i] for row in rows if row.ranked], column) for i, column in enumerate(columns)]
    return [_ranked_row(row, ranks, columns) if row.ranked else row for row in rows]


def _ranks(cells: Sequence[Cell], column: Column) -> dict[float, int]:
    """Figure as shown -> rank, for the two best distinct figures of a column; none where it does not rank."""
    if not column.ranked:
        return {}
    figures = {_as_shown(cell, column) for cell in cells} - {None}
    ordered = sorted((f for f in figures if f is not None), reverse=column.higher_is_better)
    return {figure: place + 1 for place, figure in enumerate(ordered[:2])}


def _as_shown(cell: Cell, column: Column) -> float | None:
    """The mean, rounded as the text shows it."""
    return None if cell.mean is None else round(column.scale * cell.mean, 1)


def _ranked_row(row: Row, ranks: Sequence[dict[float, int]], columns: Sequence[Column]) -> Row:
    """`row` with its ranks filled in."""
    cells = []
    for cell, rank, column in zip(row.cells, ranks, columns, strict=True):
        figure = _as_shown(cell, column)
        cells.append(Cell(cell.text, cell.mean, cell.std, None if figure is None else rank.get(figure)))
    return Row(row.label, tuple(cells), row.ranked)


def _title(model: ModelKind) -> str:
    """What was evaluated."""
    whose = {"personal": "each client's own model", "global": "the server's model"}[model]
    return f"Balanced accuracy of {whose}"


def _caption(seeds: Sequence[int]) -> str:
    """What the figures are, for under the table."""
    count = " or ".join(str(number) for number in seeds)
    spread = "one seed" if seeds == [1] else f"mean ± standard deviation over {count} seeds"
    return (
        f"In percent, {spread}. Best federated method in bold, second in italics. Weights: training images. "
        "Variance: between clients within a run (ddof 0), in squared percentage points."
    )


STYLES: dict[int | None, Callable[[str], str]] = {
    1: lambda text: f"[bold]{text}[/bold]",
    2: lambda text: f"[italic]{text}[/italic]",
    None: lambda text: text,
}


def transposed(table: Table) -> Table:
    """One column a method, for a narrow page."""
    columns = tuple(Column(row.label) for row in table.rows)
    rows = tuple(
        Row(column.heading, tuple(row.cells[i] for row in table.rows)) for i, column in enumerate(table.columns)
    )
    return Table(table.title, columns, rows, table.caption, corner="")


def to_rich(table: Table) -> rich.table.Table:
    """The table for a terminal; rows that stand apart come first, above a line."""
    import rich.table
    from rich.markup import escape

    drawn = rich.table.Table(title=table.title, caption=table.caption)
    drawn.add_column(table.corner, overflow="fold")
    for column in table.columns:
        drawn.add_column(escape(column.heading), justify="right", overflow="fold")
    for here, following in zip(table.rows, (*table.rows[1:], None), strict=True):
        last_apart = not here.ranked and following is not None and following.ranked
        texts = [STYLES[cell.rank](cell.text) for cell in here.cells]
        drawn.add_row(escape(here.label), *texts, end_section=last_apart)
    return drawn
