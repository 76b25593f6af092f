"""Commands as somebody types them, in this process, and the tables of the pages that they write."""

from __future__ import annotations

import re

from typer.testing import CliRunner, Result

from wardround.cli import app


def wardround(*arguments: object) -> Result:
    """`wardround ARGUMENTS` in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def refused(*arguments: object) -> str:
    """What is said, in one line, by a command that exits with 2."""
    result = wardround(*arguments)
    assert result.exit_code == 2, result.output
    return " ".join(line.strip() for line in result.stderr.splitlines() if not line.endswith(" ..."))


def rows(page: str, heading: str) -> dict[str, dict[str, str]]:
    """The cells of the table whose title begins a line, by the row's name and the column's heading; no bold."""
    table = re.search(r"(?:^\|.*\n?)+", page[page.index(heading) :], re.M)
    assert table is not None
    cells = [[cell.strip(" *") for cell in line.strip("| ").split("|")] for line in table[0].splitlines()]
    return {row[0]: dict(zip(cells[0][1:], row[1:], strict=True)) for row in cells[2:]}
