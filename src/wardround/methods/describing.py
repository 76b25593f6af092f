"""What methods there are and what their keys mean, for people and for programs."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from wardround.errors import InputError, suggestion
from wardround.methods.base import Method
from wardround.methods.registry import METHODS, PRESETS

if TYPE_CHECKING:
    import rich.console
    import rich.table


def describe_methods() -> list[dict[str, Any]]:
    """Every method: name, title, citation, what travels besides shared state, which skews it addresses."""
    return [_about(kind) for kind in METHODS.values()]


def describe_method(name: str) -> dict[str, Any]:
    """One method with its docstring and its keys.

    Raises:
        InputError: there is no such method.
    """
    if name in PRESETS:
        return {"name": name, "preset": PRESETS[name]} | describe_method(PRESETS[name]["method.name"])
    if name not in METHODS:
        raise InputError(f"there is no method {name!r}{suggestion(name, [*METHODS, *PRESETS])}")
    kind = METHODS[name]
    keys = [
        {"key": field.alias or key, "default": field.default, "meaning": field.description}
        for key, field in kind.model_fields.items()
    ]
    return {**_about(kind), "text": inspect.getdoc(kind) or "", "keys": keys}


def _about(kind: type[Method]) -> dict[str, Any]:
    return {
        "name": kind.name,
        "title": kind.title,
        "travels": kind.travels,
        "stays": kind.stays,
        "extra_cost": kind.extra_cost,
        "skews": list(kind.skews),
        "citation": kind.citation,
    }


def methods_table(listed: list[dict[str, Any]]) -> rich.table.Table:
    """The list as a table for a terminal."""
    from rich.table import Table

    table = Table("method", "what it is", "travels", "stays", "skews", "citation", show_lines=True)
    for one in listed:
        table.add_row(one["name"], one["title"], one["travels"], one["stays"], ", ".join(one["skews"]), one["citation"])
    return table


def method_table(one: dict[str, Any]) -> rich.console.Group:
    """One method for a terminal."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    table = Table("key", "default", "meaning")
    for key in one["keys"]:
        table.add_row(key["key"], "none" if key["default"] is None else str(key["default"]), escape(key["meaning"]))
    return Group(escape(one["text"]), "", escape(one["citation"]), *([table] if one["keys"] else []))
