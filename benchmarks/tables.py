"""What the benchmarks print and write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

DEFAULT_FOLDER = Path(__file__).parent / "results"


def show(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; all columns but the first are right-aligned."""
    table = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)


def write(folder: Path, name: str, result: Any) -> None:
    """Write `name.json` into `folder`, which is made when absent."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{file} written")
