"""The base of every section of an experiment file: immutable, and strict about unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """A frozen pydantic model whose unknown keys are errors. Each field says in its description what it does."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=())
