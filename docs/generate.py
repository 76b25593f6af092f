"""Write docs/experiment-file.md and docs/method-list.md from the classes themselves, so that they cannot fall behind.

python docs/generate.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wardround.config import Experiment
from wardround.keys import describe_keys
from wardround.methods.describing import describe_methods
from wardround.methods.registry import METHODS

HERE = Path(__file__).parent
HEAD = """# The experiment file

TOML. Every key has a default. Any key can be set on the command line, as `--set training.lr=0.05`. The word `none`
unsets a key that may be unset. Relative paths start from the file's folder. This page is written from the code by
`docs/generate.py`; `wardround keys` prints the same.
"""

LIST_HEAD = """# The methods

What travels between clients and server, what stays at a client, what a round costs beyond federated averaging, and
which differences between clients a method was made for. This page is written from the code by `docs/generate.py`;
`wardround methods` prints the same, and `wardround methods NAME` adds the equations and the keys.
"""
FIELDS = {"travels": "travels", "stays": "stays", "extra_cost": "extra cost", "skews": "made for"}


def method_page() -> str:
    """The whole list: a section a method."""
    return "\n".join([LIST_HEAD, *(method_section(one) for one in describe_methods() if "preset" not in one)])


def method_section(one: dict[str, Any]) -> str:
    """One method: title, citation, and what it says of itself."""
    said = {words: one[field] for field, words in FIELDS.items() if one[field]}
    lines = [f"- {w}: {', '.join(v) + ' skew' if isinstance(v, list) else v}" for w, v in said.items()]
    return "\n".join([f"## `{one['name']}`", "", f"{one['title']}. {one['citation']}", "", *lines, ""])


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


PAGES = {"experiment-file.md": experiment_page, "method-list.md": method_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
