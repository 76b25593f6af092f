"""The keys of a section of an experiment file, in words: default, what is allowed, meaning."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from wardround.options import Options

Described = dict[str, Any]


def describe_keys(kind: type[Options], section: str = "") -> list[Described]:
    """One entry a key of `kind` and of the sections inside it: `key`, `default`, `allowed`, `meaning`.

    Args:
        kind: the options.
        section: dotted path of the section that `kind` describes, put before its keys; empty for none.
    """
    return list(_walk(kind, section + "." if section else ""))


def _walk(kind: type[BaseModel], prefix: str) -> Iterator[Described]:
    for name, field in kind.model_fields.items():
        key = prefix + (field.alias or name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _walk(field.annotation, key + ".")
        else:
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            yield {"key": key, "default": default, "allowed": _allowed(field), "meaning": field.description or ""}


def _allowed(field: FieldInfo) -> str:
    words = _words(field.annotation, field.metadata)
    return " | ".join(dict.fromkeys(words))


_PLAIN = {bool: "true | false", int: "whole number", float: "number", str: "text", type(None): "none"}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _words(annotation: Any, bounds: list[Any]) -> list[str]:
    """What each alternative of a type allows."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(arguments[0], [*arguments[1:], *bounds])
    if origin in (UnionType, typing.Union):
        return [word for inner in arguments for word in _words(inner, bounds)]
    if origin is Literal:
        return [str(value) for value in arguments]
    if origin is tuple:
        return ["list"]
    if annotation in (int, float):
        return [" ".join([_PLAIN[annotation], ", ".join(_bounded(bounds))]).strip()]
    return [_PLAIN.get(annotation, "section")]


def _bounded(bounds: list[Any]) -> list[str]:
    """`> 0`, `<= 1`: the limits among a field's constraints."""
    limits = [*bounds, *(inner for bound in bounds for inner in getattr(bound, "metadata", ()))]
    return [
        f"{word} {getattr(limit, name):g}" for limit in limits for name, word in _BOUNDS.items() if hasattr(limit, name)
    ]
