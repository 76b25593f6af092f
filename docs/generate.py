"""Write docs/experiment-file.md from the option classes themselves, so that it cannot fall behind them.

python docs/generate.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wardround.config import Experiment
from wardround.keys import describe_keys
from wardround.methods.registry import METHODS

TARGET = Path(__file__).with_name("experiment-file.md")
HEAD = """# The experiment file

TOML. Every key has a default. Any key can be set on the command line, as `--set training.lr=0.05`. The word `none`
unsets a key that may be unset. Relative paths start from the file's folder. This page is written from the code by
`docs/generate.py`; `wardround keys` prints the same.
"""


def experiment_page() -> str:
    """The whole page: top-level keys, then a table a section, then one a method."""
    tables: dict[str, list[dict[str, Any]]] = {"": []}
    for key in describe_keys(Experiment):
        tables.setdefault(key["key"].rpartition(".")[0], []).append(key)
    parts = [HEAD, *(section(f"[{name}]" if name else "Top level", keys) for name, keys in tables.items())]
    parts += [section(f'[method] with name = "{name}"', describe_keys(kind)) for name, kind in METHODS.items()]
    return "\n".join(parts)


def section(title: str, keys: list[dict[str, Any]]) -> str:
    """One table: key, default, allowed, meaning."""
    if not keys:
        return f"## {title}\n\nNo keys of its own.\n"
    rows = "\n".join(row(key) for key in keys)
    return f"## {title}\n\n| key | default | allowed | meaning |\n|---|---|---|---|\n{rows}\n"


def row(key: dict[str, Any]) -> str:
    """One line of a table."""
    name, allowed, meaning = (key[part].replace("|", "\\|") for part in ("key", "allowed", "meaning"))
    return f"| `{name.rpartition('.')[2]}` | `{shown(key['default'])}` | {allowed} | {meaning} |"


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
