"""Methods by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from wardround.errors import InputError, suggestion
from wardround.methods.base import FedAvg, Method
from wardround.methods.ccvr import CCVR, ccvr_on
from wardround.methods.cocoop import CoCoOp
from wardround.methods.dbe import DBE
from wardround.methods.ditto import Ditto
from wardround.methods.facmic import FACMIC
from wardround.methods.fdse import FDSE
from wardround.methods.fedapt import FedAPT
from wardround.methods.fedbn import FedBN
from wardround.methods.fedclip import CLIPZeroShot, FedCLIP
from wardround.methods.fedco2 import FedCO2
from wardround.methods.fedhealth import FedHealth
from wardround.methods.fedlc import FedLC
from wardround.methods.fedlora import FedLoRA
from wardround.methods.fedmedclip import FedMedCLIP
from wardround.methods.fedper import FedPer
from wardround.methods.fedproto import FedProto
from wardround.methods.fedprox import FedProx
from wardround.methods.fedrep import FedRep
from wardround.methods.fedrod import FedRoD
from wardround.methods.finetune import FineTuning
from wardround.methods.fm2 import FM2
from wardround.methods.isolated import Isolated
from wardround.methods.lpplus import LPPlus
from wardround.methods.moon import MOON
from wardround.methods.pafp import PAFP
from wardround.methods.pafp_alt import PAFPAlt
from wardround.methods.perfedavg import PerFedAvg
from wardround.methods.promptfl import PromptFL
from wardround.methods.scaffold import SCAFFOLD
from wardround.options import explain

METHODS: dict[str, type[Method]] = {
    kind.name: kind
    for kind in (
        *(Isolated, FedAvg, FineTuning, FedHealth),
        *(FedProx, SCAFFOLD, MOON, FedLC, CCVR),
        *(FedBN, FedPer, FedRep, FedProto, Ditto, PerFedAvg, FedRoD, DBE, FedCO2, FDSE),
        *(PAFP, PAFPAlt, FM2),
        *(FedMedCLIP, CLIPZeroShot, FedCLIP, FACMIC, LPPlus, FedLoRA, PromptFL, CoCoOp, FedAPT),
    )
}

ON_TOP = "+ccvr"

# As baselines train on CLIP: cosines with the prompts, its contrastive loss, every client the same.
CONTRASTIVE = {"model.classifier": "text", "training.loss": "contrastive", "method.weights": "uniform"}

# Names that the literature uses for a method together with a setting of another section.
PRESETS: dict[str, dict[str, Any]] = {
    "ft-2b": {"method.name": "fedavg", "model.finetune_blocks": 2},
    "fedavg-ft": {"method.name": "fedavg", "model.finetune_blocks": "all"},
    "ditto-ft": {"method.name": "ditto", "model.finetune_blocks": "all"},
    "dbe-ft": {"method.name": "dbe", "model.finetune_blocks": "all"},
    "fedavg-clip": {"method.name": "fedavg", "model.finetune_blocks": "all", **CONTRASTIVE},
    "fedprox-clip": {"method.name": "fedprox", "model.adapter": "attention", **CONTRASTIVE},
    "moon-clip": {"method.name": "moon", "method.projection": 0, "model.adapter": "attention", **CONTRASTIVE},
}


def kind_of(name: str) -> type[Method] | None:
    """The class of a method: one of `METHODS`, or `NAME+ccvr` for that method with CCVR on top; None for no method."""
    kind = METHODS.get(name.removesuffix(ON_TOP))
    return ccvr_on(kind) if kind is not None and name.endswith(ON_TOP) else kind


def method_from(section: Mapping[str, Any]) -> Method:
    """The method that a `[method]` section describes: `name`, and the method's own keys.

    Raises:
        InputError: no such method, an unknown key or a value that is not allowed.
    """
    name = section.get("name", "fedavg")
    kind = kind_of(str(name))
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
