"""Lists for a terminal of any width: a heading, and below it what there is to say, wrapped beside its keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def records(entries: Sequence[Mapping[str, Any]]) -> Group:
    """Entries whose first value is a heading; empty values are left out."""
    parts: list[RenderableType] = []
    for entry in entries:
        (_, heading), *rest = entry.items()
        parts += [Text(str(heading), style="bold"), Padding(pairs(rest), (0, 0, 1, 2))]
    return Group(*parts)


def pairs(rows: Iterable[tuple[str, Any]]) -> Table:
    """Keys and values in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=8)
    table.add_column(overflow="fold")
    for key, value in rows:
        if value not in (None, "", [], ()):
            table.add_row(key.replace("_", " "), Text(shown(value)))
    return table


def keys(described: Iterable[Mapping[str, Any]]) -> Table:
    """Keys of a section with default, meaning and what is allowed (see `wardround.keys`)."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("key", style="bold", overflow="fold")
    table.add_column("default", overflow="fold")
    table.add_column("meaning, and what is allowed", overflow="fold")
    for one in described:
        meaning = Text.assemble(one["meaning"].rstrip("."), " ", (f"[{one['allowed']}]", "dim"))
        table.add_row(Text(one["key"]), Text(shown(one["default"])), meaning)
    return table


def shown(value: Any) -> str:
    """A value as an experiment file has it, texts without their quotes."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
