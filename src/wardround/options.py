"""The base of every section of an experiment file: immutable, and strict about unknown keys."""

from __future__ import annotations

from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from wardround.errors import suggestion


class Options(BaseModel):
    """A frozen pydantic model whose unknown keys are errors. Each field says in its description what it does."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _none_is_a_word(cls, values: Any) -> Any:
        """TOML has no null: where a key may be unset, the word `none` unsets it."""
        if not isinstance(values, dict):
            return values
        unset = {
            name
            for name, field in cls.model_fields.items()
            if NoneType in get_args(field.annotation) and values.get(name) == "none"
        }
        return {key: None if key in unset else value for key, value in values.items()}

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


def explain(error: ValidationError, kind: type[BaseModel], section: str = "") -> str:
    """A validation error as sentences, one a line: which key, what was found, what is allowed."""
    return "\n".join(_sentence(dict(problem), kind, section) for problem in error.errors())


def _sentence(problem: dict[str, Any], kind: type[BaseModel], section: str) -> str:
    path = [str(part) for part in problem["loc"] if not _is_branch_of_union(str(part))]
    where = ".".join(([section] if section else []) + path) or section or "experiment"
    if problem["type"] == "extra_forbidden":
        known = _fields_at(kind, path[:-1])
        return f"{where}: there is no such key{suggestion(path[-1], known)}"
    message = problem["msg"].removeprefix("Value error, ")
    found = problem.get("input")
    shown = "" if isinstance(found, (dict, BaseModel)) else f", found {found!r}"
    return f"{where}: {message[0].lower() + message[1:]}{shown}"


def _is_branch_of_union(part: str) -> bool:
    """pydantic adds the name of the tried alternative (`int`, `literal['all']`) to the path of a union."""
    return part in {"int", "float", "str", "bool"} or part.startswith(("literal[", "constrained-"))


def _fields_at(kind: type[BaseModel], path: list[str]) -> list[str]:
    """The keys of the section that `path` leads to."""
    for part in path:
        field = kind.model_fields.get(part)
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        kind = inner
    return [field.alias or name for name, field in kind.model_fields.items()]
