"""What methods there are and what their keys mean, for people and for programs."""

from __future__ import annotations

import inspect
from typing import Any

from wardround.errors import InputError, suggestion
from wardround.keys import describe_keys
from wardround.methods.base import Method
from wardround.methods.registry import METHODS, PRESETS, kind_of


def describe_methods() -> list[dict[str, Any]]:
    """Every method: name, title, what travels, what stays, the skews that it addresses, citation; and the presets."""
    return [*(_about(kind) for kind in METHODS.values()), *map(_preset, PRESETS)]


def describe_method(name: str) -> dict[str, Any]:
    """One method with its docstring and its keys; `NAME+ccvr` is one too.

    Raises:
        InputError: there is no such method.
    """
    plain = name.lower()
    if plain in PRESETS:
        return {**describe_method(PRESETS[plain]["method.name"]), **_preset(plain)}
    kind = kind_of(plain)
    if kind is None:
        raise InputError(f"there is no method {name!r}{suggestion(plain, [*METHODS, *PRESETS])}")
    return {**_about(kind), "text": inspect.getdoc(kind) or "", "keys": describe_keys(kind)}


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


def _preset(name: str) -> dict[str, Any]:
    """A name that `compare` takes for a method with a setting of another section."""
    settings = PRESETS[name]
    title = f"preset for `compare`: {', '.join(f'{key} = {value}' for key, value in settings.items())}"
    return {"name": name, "title": title, "preset": settings}
