"""The studies of FM²: what they switch, that systems have the same budget, and what is sent beside FedAvg."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from command_fixtures import rows, wardround
from experiment_fixtures import tiny, tiny_file
from wardround.config import Experiment, load_experiment
from wardround.errors import InputError
from wardround.fm2_studies import FM2_STUDIES
from wardround.methods.base import ServerSide
from wardround.methods.local_epochs import LocalEpochs
from wardround.models.classifier import build_classifier
from wardround.report.uploads import numbers_up, times, unit_of
from wardround.studies import STUDIES
from wardround.studying import Leg, plan_study

MIXED = {"data__phantoms__family": "mixed", "model__finetune_blocks": "all", "method__name": "fm2"}


def legs(name: str, experiment: Experiment | None = None) -> list[Leg]:
    return plan_study(STUDIES[name], experiment or tiny(**MIXED), Path("out"))


def methods(leg: Leg) -> dict[str, Any]:
    return {system.label: system.experiment.bound_method() for system in leg.systems}


# ---- declarations


def test_the_ablation_switches_what_the_paper_switches() -> None:
    """Only CMoE is without M_d and its alignment; what is left of y counts in full."""
    (leg,) = legs("fm2-ablation")
    assert {label: (m.gamma_d, m.gamma_c, m.strength) for label, m in methods(leg).items()} == {
        "FM²": (0.5, 0.5, 0.1),
        "w/o CMoE": (1.0, 0.0, 0.1),
        "w/o HMA": (0.5, 0.5, 0.0),
        "Only CMoE": (0.0, 1.0, 0.0),
        "Only DMoE": (1.0, 0.0, 0.0),
    }


def test_the_dials_turn_one_at_a_time() -> None:
    """Whatever the experiment has; the two gammas are one dial, as their sum is 1."""
    (leg,) = legs("fm2-sensitivity", tiny(**MIXED, method__gamma_d=0.25))
    dials = [(m.gamma_d, m.gamma_c, m.strength) for m in methods(leg).values()]
    assert dials[0] == (0.5, 0.5, 0.1)
    assert all(d + c == pytest.approx(1) for d, c, _ in dials)
    assert all((d == 0.5) != (strength == 0.1) for d, _, strength in dials[1:])
    assert len(set(dials)) == len(dials) == 9


def test_choices_of_images() -> None:
    (leg,) = legs("fm2-top-k")
    assert [(m.top_k, m.score) for m in methods(leg).values()] == [
        (k, "own-logit") for k in (50, 100, 200, 500, "all")
    ]  # fmt: skip
    for leg, k in zip(legs("fm2-score"), (50, 200), strict=True):
        assert [(m.score, m.top_k) for m in methods(leg).values()] == [
            (score, k) for score in ("random", "own-logit", "activation", "class-mean")
        ]  # fmt: skip


def test_every_routing_meets_every_average() -> None:
    (leg,) = legs("fm2-routing")
    pairs = {(m.routing, m.aggregation, m.weights) for m in methods(leg).values()}
    kinds = {(routing, how, "examples") for routing in ("hard", "soft", "prior") for how in ("expertwise", "plain")}
    assert pairs == kinds | {("hard", "expertwise", "uniform")}


@pytest.mark.parametrize("name", ["fm2-schedule", "fm2-communication"])
def test_all_have_as_many_local_epochs(name: str) -> None:
    """Where a round passes over the images once, not twice, there are twice the rounds, evaluated half as often."""
    (leg,) = legs(name, tiny(**MIXED, rounds=3, federation__evaluate_every=2, training__local_epochs=2))
    for system in leg.systems:
        experiment, fused = system.experiment, system.label == "fused" or system.label.startswith("FM²")
        assert (experiment.rounds, experiment.federation.evaluate_every) == ((3, 2) if fused else (6, 4))
        assert LocalEpochs(experiment.bound_method(), experiment.training).until(experiment.rounds) == 12


def test_studies_without_a_budget_leave_rounds_alone() -> None:
    assert {s.experiment.rounds for name in ("fm2-ablation", "fm2-routing") for s in legs(name)[0].systems} == {4}


@pytest.mark.parametrize("study", FM2_STUDIES, ids=lambda study: study.name)
@pytest.mark.parametrize("file", ["mimh_stand_alone", "mimh_5domain", "mimh_phantoms"])
def test_the_examples_fit_every_study(study: Any, file: str) -> None:
    told = ["captions.provider=callable", "captions.callable=a:b"] if study.captions else []
    experiment = load_experiment(Path(__file__).parents[1] / "examples" / f"{file}.toml", told)
    for leg in plan_study(study, experiment, Path("out")):
        assert study.reference in [system.label for system in leg.systems]
        assert len({system.folder_name for system in leg.systems}) == len(leg.systems)


def test_captions_come_from_somewhere_or_not_at_all() -> None:
    """What needs no file is given none, and may not be told at a test; the rest is the experiment's."""
    own = tiny(**MIXED, captions__provider="callable", captions__callable="a:b", captions__at_test=True)
    found = {s.label: s.experiment.captions for s in legs("fm2-captions", own)[0].systems}
    assert {label: (c.provider, c.callable, c.at_test) for label, c in found.items()} == {
        "images alone": ("none", None, False),
        "templates": ("template", None, False),
        "own captions": ("callable", "a:b", True),
    }
    templates = tiny(**MIXED, captions__provider="template")
    shares = {s.label: s.experiment.captions for s in legs("fm2-caption-coverage", templates)[0].systems}
    assert shares.pop("images alone").provider == "none"
    assert {label: c.coverage for label, c in shares.items()} == {
        f"{percent} % captioned": percent / 100 for percent in (0, 20, 40, 60, 80, 100)
    }  # fmt: skip
    with pytest.raises(InputError, match=r'captions\.provider is "template" \(allowed: "file", "callable"\)'):
        legs("fm2-captions", templates)
    with pytest.raises(InputError, match=r'captions\.provider is "none"'):
        legs("fm2-caption-coverage")


# ---- communication


def test_the_published_uploads_beside_federated_averaging() -> None:
    """38 % more for Tiny and twice as much for Large, of ResNet-4's 519,829; FedProto sends 168 numbers a class."""
    (leg,) = legs("fm2-communication", tiny(**MIXED, model__backbone="wardround:resnet4", model__head="shared"))
    ups = {system.label: upload(system.experiment) for system in leg.systems}
    unit = unit_of((leg_method(leg, label), up) for label, up in ups.items())
    assert unit == 519_829
    assert {label: times(up, unit) for label, up in ups.items()} == {
        "FedAvg": "1.000", "FedProto": "0.012", "FM²-Tiny": "1.380", "FM²-Medium": "1.594", "FM²-Large": "2.023",
    }  # fmt: skip
    assert ups["FM²-Tiny"] == 717_523 + 5  # and the images of each modality
    assert ups["FedProto"] == 37 * 168


def leg_method(leg: Leg, label: str) -> str:
    return next(str(s.experiment.method["name"]) for s in leg.systems if s.label == label)


def upload(experiment: Experiment) -> int | None:
    """`numbers_up` with the paper's 37 classes and five modalities, at a size that builds fast."""
    method = experiment.bound_method()
    model = build_classifier(experiment.model, 37, 3, 28, seed=0, modalities=tuple("abcde"))
    method.edit(model, 28)
    side = ServerSide(method, model, 28)
    return numbers_up(
        {"parameters": side.parameter_elements, "communication": {"statistic_elements": side.statistic_elements}}
    )


def test_a_unit_only_where_there_is_something_to_compare() -> None:
    assert unit_of([("fedavg", 10), ("fm2", 14)]) == 10
    assert unit_of([("fedavg", 10), ("fedavg", 10)]) is None
    assert unit_of([("fm2", 14)]) is None
    assert unit_of([("fedavg", None), ("fm2", 14)]) is None
    assert (times(14, 10), times(None, 10), times(14, None)) == ("1.400", "–", "–")
    assert numbers_up({"communication": {"statistic_elements": 3}}) is None


# ---- a study as it is run


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All three schedules for two local epochs."""
    root = tmp_path_factory.mktemp("schedules")
    few = {"data__phantoms__train_per_client": 8, "data__phantoms__classes": 2}
    file = tiny_file(root, **MIXED, **few, rounds=1, federation__evaluate_every=1)
    result = wardround("study", "fm2-schedule", file, "--out", root / "out", "--workers", 1)
    assert result.exit_code == 0, result.output
    return root / "out"


def test_the_page_counts_rounds_and_epochs(schedules: Path) -> None:
    table = rows((schedules / "study.md").read_text(), "What it takes.")
    counted = {label: (row["rounds"], row["local epochs"]) for label, row in table.items()}
    assert counted == {"fused": ("1", "2"), "interleaved": ("2", "2"), "sequential": ("2", "2")}
    assert "÷ fedavg" not in table["fused"]
    record = json.loads((schedules / "study.json").read_text())
    assert [(s["rounds"], s["local_epochs"]) for s in record["parts"][0]["systems"]] == [(1, 2), (2, 2), (2, 2)]


def test_the_page_weighs_clients_and_names_the_difference(schedules: Path) -> None:
    table = rows((schedules / "study.md").read_text(), "In which order FM² takes its stages. In percent")
    results = json.loads((schedules / "interleaved" / "results.json").read_text())
    weighted = results["summary"]["weighted_average"]["mean"]
    assert table["interleaved"]["balanced accuracy, weighted"] == f"{100 * weighted:.1f}"
    assert table["fused"]["− fused"] == "–"
    assert "[" in table["sequential"]["− fused"]


def test_curves_are_drawn_over_local_epochs(schedules: Path) -> None:
    page = (schedules / "study.md").read_text()
    assert "](convergence.png)" in page
    with Image.open(schedules / "convergence.png") as picture:
        low, high = picture.convert("L").getextrema()
        assert low < 100 < high
    report = (schedules / "report.html").read_text()
    assert "Line chart, Balanced accuracy, over the local epochs." in report
    assert "were trained on 3 clients for 1 to 2 rounds" in report


def test_one_dial_alone_is_refused_where_the_experiment_turns_it(tmp_path: Path) -> None:
    said = wardround("study", "fm2-ablation", tiny_file(tmp_path, **MIXED, method__lambda=0.0), "--out", tmp_path / "o")
    assert said.exit_code == 2
    assert "are the same system here; leave method.lambda" in " ".join(said.stderr.split())


def test_disjoint_modalities_have_both_local_references_and_the_same_epochs() -> None:
    """A fused round of FM² has two epochs, one of FedRep too; the others take twice the rounds."""
    (leg,) = legs("disjoint-modalities", tiny(**MIXED, rounds=3))
    rounds = {system.label: system.experiment.rounds for system in leg.systems}
    assert {label for label, count in rounds.items() if count == 3} == {
        "FedRep", "FM² alone", "FM²-Tiny", "FM²-Medium", "FM²-Large",
    }  # fmt: skip
    assert {count for count in rounds.values() if count != 3} == {6}
    alone = methods(leg)["FM² alone"]
    assert not alone.aggregate
    assert (alone.strength, alone.size) == (0, "tiny")
    assert methods(leg)["alone"].name == "isolated"
