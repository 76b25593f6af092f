"""The studies of FM²: what its parts are worth, how much its dials matter, and what it costs to send.

The paper's figures and tables are named where a study stands for one. Where the paper leaves a dial open, the study
asks what our reading of it is worth.
"""

from __future__ import annotations

from typing import Any

from wardround.study import Axis, Study

FM2 = "FM²: a federated medical multimodal foundation model (2026)"

WHOLE = "FM²"
"""The whole system; the labels of the ablation are the paper's."""

# gamma_d + gamma_c = 1: what is left of y counts in full.
_WITHOUT_CMOE: dict[str, Any] = {"method.gamma_d": 1.0, "method.gamma_c": 0.0}
_WITHOUT_DMOE: dict[str, Any] = {"method.gamma_d": 0.0, "method.gamma_c": 1.0}
_WITHOUT_HMA: dict[str, Any] = {"method.lambda": 0.0}

_ABLATION = Study(
    name="fm2-ablation",
    title="What each part of FM² is worth",
    question="Which of private experts by class, shared experts by modality and their alignment makes the difference?",
    source=f"{FM2}, Fig. 3a",
    method="fm2",
    systems={
        WHOLE: {},
        "w/o CMoE": _WITHOUT_CMOE,
        "w/o HMA": _WITHOUT_HMA,
        "Only CMoE": _WITHOUT_DMOE | _WITHOUT_HMA,
        "Only DMoE": _WITHOUT_CMOE | _WITHOUT_HMA,
    },
    reference=WHOLE,
)

DIALS: dict[str, Any] = {"method.gamma_d": 0.5, "method.gamma_c": 0.5, "method.lambda": 0.1}
"""The paper's defaults."""


def _gammas(domain: float) -> dict[str, Any]:
    return DIALS | {"method.gamma_d": domain, "method.gamma_c": round(1 - domain, 2)}


_SENSITIVITY = Study(
    name="fm2-sensitivity",
    title="How much gamma and lambda matter",
    question="How far does FM² fall when gamma_d, gamma_c = 1 - gamma_d or lambda is not the default?",
    source=f"{FM2}, Fig. 3b",
    method="fm2",
    systems={
        "default": DIALS,
        **{f"gamma_d {value}": _gammas(value) for value in (0.1, 0.3, 0.7, 0.9)},
        **{f"lambda {value}": DIALS | {"method.lambda": value} for value in (0.01, 0.05, 0.5, 1.0)},
    },
    reference="default",
)

_TOP_K = Study(
    name="fm2-top-k",
    title="How many images a class stage 2 needs",
    question="What does K, the images of each class that train the experts, make of accuracy and time?",
    source=f"{FM2}, Appendix B",
    method="fm2",
    systems={f"top {k}": {"method.top_k": k} for k in (50, 100, 200, 500)} | {"all": {"method.top_k": "all"}},
    reference="top 200",
)

_SCORE = Study(
    name="fm2-score",
    title="Which images a class stands for",
    question="Is an image that scores high a better choice than one at random, and how should a vector score?",
    source=f"{FM2}, Sec. 3.2",
    method="fm2",
    systems={
        "random": {"method.score": "random"},
        "own logit": {"method.score": "own-logit"},
        "activation": {"method.score": "activation"},
        "class mean": {"method.score": "class-mean"},
    },
    axes=(Axis("K", {f"{k} a class": {"method.top_k": k} for k in (50, 200)}),),
    reference="random",
)


def _routed(routing: str, aggregation: str) -> dict[str, Any]:
    return {"method.routing": routing, "method.aggregation": aggregation, "method.weights": "examples"}


_ROUTING = Study(
    name="fm2-routing",
    title="Who trains which expert, and how experts are averaged",
    question="Is a modality's expert better assigned or learned, and better averaged over its own clients or all?",
    source=FM2,
    method="fm2",
    systems={
        **{
            f"{routing} {aggregation}": _routed(routing, aggregation)
            for routing in ("hard", "soft", "prior")
            for aggregation in ("expertwise", "plain")
        },
        "hard expertwise uniform": _routed("hard", "expertwise") | {"method.weights": "uniform"},
    },
    reference="hard expertwise",
)

_SIZES = {f"FM²-{size.capitalize()}": {"method.size": size} for size in ("tiny", "medium", "large")}

_COMMUNICATION = Study(
    name="fm2-communication",
    title="What FM² sends, beside federated averaging and prototypes",
    question="What do larger experts buy, and what do they cost in messages, at the same number of local epochs?",
    source=f"{FM2}, Table 7",
    method="fm2",
    systems={"FedAvg": {"method.name": "fedavg"}, "FedProto": {"method.name": "fedproto"}, **_SIZES},
    reference="FM²-Tiny",
    equal_epochs=True,
)

_SCHEDULE = Study(
    name="fm2-schedule",
    title="In which order FM² takes its stages",
    question="Does it matter whether the experts train in every round, in every other one, or after the backbone?",
    source=FM2,
    method="fm2",
    systems={kind: {"method.schedule": kind} for kind in ("fused", "interleaved", "sequential")},
    reference="fused",
    equal_epochs=True,
)


def _captioned(provider: str) -> dict[str, Any]:
    """Captions that need no file, or none."""
    nowhere = {"captions.file": None, "captions.callable": None}
    return {"captions.provider": provider, "captions.states_label": True, "captions.at_test": False} | nowhere


IMAGES_ALONE = "images alone"

_CAPTIONS = Study(
    name="fm2-captions",
    title="Whose captions help",
    question="Do captions from the experiment's file or function help more than templates, and do any?",
    source=f"{FM2}, Fig. 3c",
    method="fm2",
    systems={IMAGES_ALONE: _captioned("none"), "templates": _captioned("template"), "own captions": {}},
    reference=IMAGES_ALONE,
    captions=("file", "callable"),
)

# With no caption at all the network is that of the others: what captions themselves are worth is beside that one.
_COVERAGE = Study(
    name="fm2-caption-coverage",
    title="How many images need a caption",
    question="What do captions help where only a share of the training images has one?",
    source=f"{FM2}, Fig. 3d",
    method="fm2",
    systems={IMAGES_ALONE: _captioned("none")}
    | {f"{100 * share:.0f} % captioned": {"captions.coverage": share} for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)},
    reference=IMAGES_ALONE,
    captions=("template", "file", "callable"),
)

_BASELINES = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox",
    "Per-FedAvg": "per-fedavg",
    "FedBN": "fedbn",
    "FedProto": "fedproto",
    "FedRep": "fedrep",
    "alone": "isolated",
}
_ALONE: dict[str, Any] = {"method.size": "tiny", "method.aggregate": False} | _WITHOUT_HMA

_DISJOINT = Study(
    name="disjoint-modalities",
    title="Whether clients with different kinds of images help each other",
    question="Do clients of unlike modalities gain from training together, over the same networks without the others?",
    source=f"{FM2}, Sec. 4, stand-alone modality",
    systems={
        **{label: {"method.name": name} for label, name in _BASELINES.items()},
        "FM² alone": {"method.name": "fm2"} | _ALONE,
        **{label: {"method.name": "fm2"} | changes for label, changes in _SIZES.items()},
    },
    reference="FM²-Tiny",
    equal_epochs=True,
)

FM2_STUDIES = (
    _DISJOINT,
    _ABLATION,
    _SENSITIVITY,
    _TOP_K,
    _SCORE,
    _ROUTING,
    _COMMUNICATION,
    _SCHEDULE,
    _CAPTIONS,
    _COVERAGE,
)
