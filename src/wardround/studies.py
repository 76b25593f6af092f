"""Named studies of methods: what is compared with what, declared as data.

A study is an experiment of the user's with declared changes around it: see `wardround.study`. `wardround.studying` runs
it.
"""

from __future__ import annotations

from typing import Any

from wardround.errors import InputError, suggestion
from wardround.federation.codecs import CODECS
from wardround.fm2_studies import FM2_STUDIES
from wardround.study import Study, clients_axis, partition_axis

FEDMEDCLIP = "FedMedCLIP: federated adaptation of a frozen CLIP encoder (2025)"

_ABLATION = Study(
    name="fedmedclip-ablation",
    title="What each part of FedMedCLIP is worth",
    question="Which of contrastive loss, private classifier, agreement and aggregation makes the difference?",
    source=FEDMEDCLIP,
    method="fedmedclip",
    systems={
        "contr": {"method.private_mlp": False},
        "contr + MLP": {"method.agreement": "none"},
        "MLP not shared": {"method.contrastive": "none", "method.agreement": "none", "method.aggregate": False},
        "all not shared": {"method.aggregate": False},
        "all but contr": {"method.contrastive": "none"},
        "all": {},
    },
    reference="all",
)

_CODING = Study(
    name="coding",
    title="What coding the messages costs and saves",
    question="How many bytes does a codec save, and what does it cost in accuracy?",
    source=FEDMEDCLIP,
    systems={name: {"transport.codec": name} for name in CODECS},
    reference="float32",
    uncoded="float32",
)

_SCALABILITY = Study(
    name="scalability",
    title="More clients with fewer images each",
    question="How does a method bear it when the same images are dealt to more clients, alike or unlike ones?",
    source=FEDMEDCLIP,
    axes=(clients_axis([5, 10, 15]), partition_axis()),
    needs_held_out=True,
)

STUDIES: dict[str, Study] = {study.name: study for study in (_ABLATION, _CODING, _SCALABILITY, *FM2_STUDIES)}
"""Every study by its name; a new one is a line here."""


def study_named(name: str) -> Study:
    """The study called `name`.

    Raises:
        InputError: no study has that name.
    """
    if name not in STUDIES:
        raise InputError(f"there is no study {name!r}{suggestion(name, STUDIES)}")
    return STUDIES[name]


def describe_studies() -> list[dict[str, Any]]:
    """One entry a study: what it asks, where it is from, and what it runs."""
    return [
        {
            "name": study.name,
            "title": study.title,
            "question": study.question,
            "source": study.source,
            "method": study.method or ("the experiment's own" + ("" if study.systems else ", or those of --methods")),
            "systems": list(study.systems),
            "parts": [part.label for part in study.parts if part.label],
        }
        for study in STUDIES.values()
    ]
