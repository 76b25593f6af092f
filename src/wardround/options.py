"""The base of every section of an experiment file: immutable, and strict about unknown keys and types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from wardround.errors import suggestion


class Options(BaseModel):
    """A frozen pydantic model whose unknown keys are errors. Each field says in its description what it does."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,  # `batch_size = true` is not 1, `lr = "0.1"` is not a number
        allow_inf_nan=False,
        populate_by_name=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _as_toml_means_it(cls, values: Any) -> Any:
        """TOML has no null, so the word `none` unsets a key that may be unset; and its lists are our tuples."""
        if not isinstance(values, dict):
            return values
        unset = {
            name
            for name, field in cls.model_fields.items()
            if NoneType in get_args(field.annotation) and values.get(name) == "none"
        }
        tuples = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        return {key: None if key in unset else value for key, value in tuples.items()}

    def to_toml(self) -> dict[str, Any]:
        """Every key with its value, defaults included, as TOML can hold it."""
        found: dict[str, Any] = _without_null(self.model_dump(mode="json", by_alias=True))
        return found


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_null(inner) for inner in value]
    return "none" if value is None else value


def explain(error: ValidationError, kind: type[BaseModel], section: str = "", besides: Sequence[str] = ()) -> str:
    """A validation error as sentences, one a line: which key, what is allowed, what was found.

    Args:
        error: of validating `kind`.
        kind: whose fields are the keys.
        section: dotted path of the section that `kind` describes; empty for the whole file.
        besides: keys that the section may hold although `kind` does not know them.
    """
    by_key: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for problem in error.errors():
        path = tuple(str(part) for part in problem["loc"] if not _is_branch_of_union(str(part)))
        by_key.setdefault(path, []).append(dict(problem))
    names = {path: ".".join([section, *path] if section else path) or "the file" for path in by_key}
    strangers = {path for path, problems in by_key.items() if problems[0]["type"] == "extra_forbidden"}
    return "\n".join(
        f"{names[path]}: there is no such key{_nearest(kind, path, section, besides)}"
        if path in strangers
        else _sentence(names[path], problems)
        for path, problems in by_key.items()
    )


def _sentence(where: str, problems: list[dict[str, Any]]) -> str:
    """One key's problems: several when each alternative of a union refuses the value in its own words."""
    first = problems[0]
    if first["type"] == "missing":
        return f"{where}: is missing"
    if first["type"] == "value_error":
        return f"{where}: {first['msg'].removeprefix('Value error, ')}"
    expected = dict.fromkeys(_expected(problem, where) for problem in problems)
    return f"{where}: expected {', or '.join(expected)}, found {_shown(first['input'])}"


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text in quotes",
    "string_too_short": "a text that is not empty",
    "tuple_type": 'a list such as ["a", "b"]',
    "too_short": "at least {min_length} entries",
    "literal_error": "{expected}",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number from {ge:g} up",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number up to {le:g}",
    "dict_type": "a section [{where}]",
    "model_type": "a section [{where}]",
}


def _expected(problem: dict[str, Any], where: str) -> str:
    """What is allowed in words; pydantic's own where we have none."""
    words = _EXPECTED.get(problem["type"])
    return words.format(where=where, **problem.get("ctx", {})) if words else str(problem["msg"])


def _shown(value: Any) -> str:
    """A value as a person wrote it."""
    if isinstance(value, dict | BaseModel):
        return "a section"
    return str(value).lower() if isinstance(value, bool) else repr(list(value) if isinstance(value, tuple) else value)


def _is_branch_of_union(part: str) -> bool:
    """pydantic adds the name of the tried alternative (`int`, `literal['all']`) to the path of a union."""
    return part in {"int", "float", "str", "bool"} or part.startswith(("literal[", "constrained-"))


def _nearest(kind: type[BaseModel], path: Sequence[str], section: str, besides: Sequence[str]) -> str:
    """The same key in another section, else the most alike one in this section, else all of this section's."""
    here = _section_at(kind, path[:-1])
    elsewhere = [key for key in _all_keys(kind, section) if key.rpartition(".")[2] == path[-1]]
    if elsewhere:
        return f" (did you mean {' or '.join(map(repr, elsewhere))}?)"
    names = [*_names(here), *besides] if here else []
    return suggestion(path[-1], names) if names else ""


def _section_at(kind: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The model of the section that `path` leads to; None where a section's keys are free."""
    for part in path:
        inner = kind.model_fields[part].annotation if part in kind.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return None
        kind = inner
    return kind


def _names(kind: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in kind.model_fields.items()]


def _all_keys(kind: type[BaseModel], section: str) -> Iterator[str]:
    """Every key below `kind` with its dotted path."""
    for name, field in kind.model_fields.items():
        path = f"{section}.{field.alias or name}" if section else field.alias or name
        yield path
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _all_keys(field.annotation, path)
