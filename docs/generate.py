"""Write docs/experiment-file.md from the option classes themselves, so that it cannot fall behind them.

python docs/generate.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from wardround.config import Experiment
from wardround.methods.registry import METHODS

TARGET = Path(__file__).with_name("experiment-file.md")
HEAD = """# The experiment file

TOML. Every key has a default except where one is marked *required*. Any key can be set on the command line, as
`--set training.lr=0.05`. The word `none` unsets a key that may be unset. Relative paths start from the file's folder.
This page is written from the code by `docs/generate.py`.
"""


def experiment_page() -> str:
    """The whole page."""
    parts = [HEAD, section("Top level", Experiment, "")]
    for name, field in Experiment.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            parts += sections(name, field.annotation)
    parts += [section(f'[method] with name = "{name}"', kind, "") for name, kind in METHODS.items()]
    return "\n".join(parts)


def sections(name: str, kind: type[BaseModel]) -> list[str]:
    """A section and the sections inside it."""
    found = [section(f"[{name}]", kind, name)]
    for key, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += sections(f"{name}.{key}", field.annotation)
    return found


def section(title: str, kind: type[BaseModel], name: str) -> str:
    """One table: key, default, allowed, meaning."""
    rows = [row(field.alias or key, field) for key, field in kind.model_fields.items() if not is_section(field)]
    if not rows:
        return f"## {title}\n\nNo keys of its own.\n"
    return f"## {title}\n\n| key | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def is_section(field: FieldInfo) -> bool:
    """Whether a field is a section of its own."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def row(key: str, field: FieldInfo) -> str:
    """One line of a table."""
    default = "*required*" if field.is_required() else f"`{shown(field.get_default(call_default_factory=True))}`"
    meaning = (field.description or "").replace("|", "\\|").rstrip(".")
    allowed = [str(value) for value in literals(field.annotation)]
    listed = f" Allowed: {', '.join(f'`{value}`' for value in allowed)}." if allowed else ""
    return f"| `{key}` | {default} | {meaning}.{listed} |"


def literals(annotation: Any) -> list[Any]:
    """The words that an annotation allows, however deep they stand in it."""
    found = []
    for part in get_args(annotation):
        if isinstance(part, str):
            found.append(part)
        elif not isinstance(part, type):
            found += literals(part)
    return found


def shown(value: Any) -> str:
    """A default as TOML has it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {shown(inner)}" for key, inner in value.items()) + " }" if value else "{}"
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    TARGET.write_text(experiment_page(), encoding="utf-8")
