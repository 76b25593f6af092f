"""Commands as somebody types them, in this process."""

from __future__ import annotations

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
