"""Methods by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from wardround.errors import InputError, suggestion
from wardround.methods.base import FedAvg, Method
from wardround.methods.fedbn import FedBN
from wardround.methods.fedper import FedPer
from wardround.methods.fedprox import FedProx
from wardround.methods.fedrep import FedRep
from wardround.methods.isolated import Isolated
from wardround.methods.pafp import PAFP
from wardround.methods.pafp_alt import PAFPAlt
from wardround.options import explain

METHODS: dict[str, type[Method]] = {
    kind.name: kind for kind in (Isolated, FedAvg, FedProx, FedBN, FedPer, FedRep, PAFP, PAFPAlt)
}

# Names that the literature uses for a method together with a setting of another section.
PRESETS: dict[str, dict[str, Any]] = {
    "ft-2b": {"method.name": "fedavg", "model.finetune_blocks": 2},
    "fedavg-ft": {"method.name": "fedavg", "model.finetune_blocks": "all"},
}


def method_from(section: Mapping[str, Any]) -> Method:
    """The method that a `[method]` section describes: `name`, and the method's own keys.

    Raises:
        InputError: no such method, an unknown key or a value that is not allowed.
    """
    name = section.get("name", "fedavg")
    kind = METHODS.get(str(name))
    if kind is None:
        raise InputError(f"method.name: there is no method {name!r}{_hint(str(name))}")
    try:
        return kind(**{key: value for key, value in section.items() if key != "name"})
    except ValidationError as error:
        raise InputError(explain(error, kind, "method", besides=["name"])) from error


def _hint(name: str) -> str:
    """What an unknown name probably stands for."""
    preset = PRESETS.get(name.lower())
    if preset is None:
        return suggestion(name.lower(), METHODS)
    written = ", ".join(f"{key} = {json.dumps(value)}" for key, value in preset.items())
    return f", but `compare` takes {name.lower()!r} for {written}"
