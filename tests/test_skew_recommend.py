"""From figures to advice: what counts as strong, which methods that speaks for, and that nothing else is named."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiment_fixtures import tiny
from report_fixtures import write_compare
from wardround.data.federation import ClientData, Federation, Samples, samples
from wardround.data.read import read_federation
from wardround.errors import InputError
from wardround.measuring import measure_skew
from wardround.methods.registry import METHODS
from wardround.methods.trial import Network
from wardround.models.backbones.registry import has_text
from wardround.report.page import write_report
from wardround.skew.analyse import analyse_skew
from wardround.skew.labels import jensen_shannon_matrix, label_distribution
from wardround.skew.mmd import mmd_matrix
from wardround.skew.recommend import FAMILIES, MOST_FIRST, recommend
from wardround.skew.same_labels import same_label_matrix, same_label_mmd
from wardround.skew.strength import FEW_PER_CLASS, label_chance, strengths, tiny_clients

MADE_UP = {
    "isolated": (),
    "fedavg": (),
    "prox": ("label", "quantity"),
    "norms": ("feature",),
    "heads": ("label", "concept"),
    "align": ("feature", "label"),
}


# ---- feature distance with labels made equal


def loop_distance(x: np.ndarray, xl: np.ndarray, y: np.ndarray, yl: np.ndarray, gamma: float) -> float:
    """The square's definition, pair by pair: every class weighs the same, and no row meets itself."""

    def k(a: np.ndarray, b: np.ndarray) -> float:
        return sum(math.exp(-s * gamma * float(((a - b) ** 2).sum())) for s in (0.25, 0.5, 1, 2, 4)) / 5

    def mean(a: list[np.ndarray], b: list[np.ndarray], same: bool) -> float:
        values = [k(p, q) for i, p in enumerate(a) for j, q in enumerate(b) if not (same and i == j)]
        return sum(values) / len(values)

    groups = [(1, [r for r, c in zip(x, xl, strict=True) if c == k]) for k in (0, 1)]
    groups += [(-1, [r for r, c in zip(y, yl, strict=True) if c == k]) for k in (0, 1)]
    square = sum(s * t / 4 * mean(a, b, i == j) for i, (s, a) in enumerate(groups) for j, (t, b) in enumerate(groups))
    return math.sqrt(max(square, 0))


def test_same_label_distance_equals_the_double_loop() -> None:
    """Unequal class sizes; class 2 is too rare at the second client to count."""
    rng = np.random.default_rng(0)
    xl, yl = np.repeat([0, 1, 2], [9, 4, 6]), np.repeat([0, 1, 2], [5, 8, 3])
    x, y = rng.normal(size=(19, 3)), rng.normal(0.8, 1, (16, 3))
    assert same_label_mmd(x, xl, y, yl, 0.2) == pytest.approx(loop_distance(x[:13], xl[:13], y[:13], yl[:13], 0.2))


def two_classes(rng: np.random.Generator, counts: tuple[int, int], shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Two classes at 0 and 3 on every axis of a plane, moved by `shift`."""
    labels = np.repeat([0, 1], counts)
    return rng.normal(3.0 * labels[:, None] + shift, 1.0, (len(labels), 2)), labels


def test_label_skew_does_not_pass_for_feature_skew() -> None:
    """The plain distance sees unequal labels; with labels made equal only the shifted client is apart."""
    rng = np.random.default_rng(1)
    made = {"a": two_classes(rng, (150, 30)), "b": two_classes(rng, (30, 150)), "c": two_classes(rng, (90, 90), 2.0)}
    features, labels = ({name: pair[k] for name, pair in made.items()} for k in (0, 1))
    plain, equal = mmd_matrix(features), same_label_matrix(features, labels)
    assert plain[0, 1] > 0.4
    assert equal[0, 1] < 0.1
    assert equal[0, 2] > 0.3
    assert np.array_equal(equal, equal.T)
    assert np.array_equal(np.diag(equal), np.zeros(3))


def test_exchanged_labels_do_not_pass_for_feature_skew() -> None:
    rng = np.random.default_rng(2)
    (x, xl), (y, yl) = two_classes(rng, (100, 100)), two_classes(rng, (100, 100))
    assert same_label_mmd(x, xl, y, 1 - yl, 0.1) < 0.1


def test_without_shared_classes_there_is_no_distance() -> None:
    rows = np.random.default_rng(0).normal(size=(10, 2))
    features = {"a": rows, "b": rows + 1, "none": np.zeros((0, 2))}
    labels = {"a": np.zeros(10, np.int64), "b": np.ones(10, np.int64), "none": np.zeros(0, np.int64)}
    found = same_label_matrix(features, labels)
    assert np.isnan(found[0, 1])
    assert np.isnan(found[2]).all()


# ---- how strong


def matrix(value: float | None, diagonal: float | None = 0.0, clients: int = 3) -> list[list[float | None]]:
    """`value` between any two clients."""
    return [[diagonal if i == j else value for j in range(clients)] for i in range(clients)]


def measured(
    same: float | None = 0.0,
    p: float | None = 0.5,
    js: float | None = 0.0,
    images: tuple[int, ...] = (1000, 1000, 1000),
    disagree: float | None = 0.1,
    permutations: int = 500,
) -> dict[str, Any]:
    """The parts of `skew.json` that advice is drawn from; nothing is skewed unless said otherwise."""
    shares = np.array(images) / max(sum(images), 1)
    known = shares[shares > 0]
    return {
        "clients": ["a", "b", "c"],
        "quantity": {"images": list(images), "effective_clients": float(2 ** -(known * np.log2(known)).sum())},
        "label": {
            "jensen_shannon": matrix(js),
            "counts": [[n // 2, n - n // 2] for n in images],
            "absent": [[], [], ["rare"]],
        },
        "feature": {"same_labels": matrix(same), "p_values": matrix(p, None), "permutations": permutations},
        "concept": {"disagreement": matrix(disagree, 0.1)},
    }


@pytest.mark.parametrize(
    ("changes", "kind", "level"),
    [
        ({"same": 0.05, "p": 0.001}, "feature", "little"),
        ({"same": 0.15, "p": 0.001}, "feature", "some"),
        ({"same": 0.2, "p": 0.001}, "feature", "strong"),
        ({"same": 0.5, "p": 0.2}, "feature", "little"),  # the test finds nothing
        ({"same": 0.5, "p": 1 / 11, "permutations": 10}, "feature", "strong"),  # as small as 10 can give
        ({"same": None, "p": 0.001}, "feature", "unknown"),
        ({"js": 0.02}, "label", "little"),
        ({"js": 0.05}, "label", "some"),
        ({"js": 0.3}, "label", "strong"),
        ({"js": 0.04, "images": (12, 12, 12)}, "label", "little"),  # 0.03 of it is chance
        ({"js": None}, "label", "unknown"),
        ({"images": (1000, 500, 400)}, "quantity", "little"),
        ({"images": (1000, 500, 250)}, "quantity", "some"),
        ({"images": (1000, 500, 100)}, "quantity", "strong"),
        ({"images": (1000, 0, 0)}, "quantity", "unknown"),
        ({"disagree": 0.2}, "concept", "little"),
        ({"disagree": 0.35}, "concept", "some"),
        ({"disagree": 0.6}, "concept", "strong"),
        ({"disagree": None}, "concept", "unknown"),
    ],
)
def test_levels(changes: dict[str, Any], kind: str, level: str) -> None:
    found = {one.kind: one for one in strengths(measured(**changes))}
    assert found[kind].level == level  # type: ignore[index]
    assert list(found) == ["feature", "label", "quantity", "concept"]


def test_chance_of_labels_is_what_equal_clients_show() -> None:
    """Mean divergence of two samples of one distribution, over many draws, within a tenth of the formula."""
    rng = np.random.default_rng(0)
    shares = np.array([0.5, 0.3, 0.2])
    drawn = [np.stack([rng.multinomial(60, shares), rng.multinomial(90, shares)]) for _ in range(2000)]
    seen = np.mean([jensen_shannon_matrix(label_distribution(counts))[0, 1] for counts in drawn])
    assert label_chance(drawn[0])[0, 1] == pytest.approx(seen, rel=0.1)
    assert np.isnan(label_chance(np.array([[3, 1], [0, 0]]))[0, 1])


def test_tiny_clients_are_those_with_few_images_a_class_that_they_have() -> None:
    skew = {
        "clients": ["enough", "few", "one class", "none"],
        "label": {"counts": [[FEW_PER_CLASS, FEW_PER_CLASS], [30, 5], [FEW_PER_CLASS, 0], [0, 0]]},
    }
    assert tiny_clients(skew) == ["few"]


# ---- advice


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({}, ["fedavg"]),
        ({"same": 0.4, "p": 0.001}, ["norms", "align"]),
        ({"js": 0.3}, ["prox", "heads", "align"]),
        ({"images": (1000, 500, 50)}, ["prox"]),
        ({"disagree": 0.7}, ["heads"]),
        ({"same": 0.4, "p": 0.001, "js": 0.3}, ["align", "norms", "prox", "heads"]),
        ({"same": 0.15, "p": 0.001, "js": 0.3}, ["align", "prox", "norms", "heads"]),
        ({"js": 0.3, "images": (1000, 500, 50)}, ["prox", "heads", "align"]),
        ({"same": 0.4, "p": 0.001, "images": (1000, 500, 50)}, ["norms", "prox", "align"]),
    ],
)
def test_methods_that_address_most_come_first(changes: dict[str, Any], first: list[str]) -> None:
    assert recommend(measured(**changes), MADE_UP)["first"] == first


def test_of_equals_those_that_name_it_first_come_first() -> None:
    methods = {"late": ("label", "feature"), "early": ("feature", "label"), "more": ("feature", "label", "concept")}
    assert recommend(measured(same=0.4, p=0.001), methods)["first"] == ["early", "late", "more"]


def test_only_what_is_there_is_named() -> None:
    """Without methods nothing is recommended; with the real ones, only those that are registered."""
    strong = measured(same=0.4, p=0.001, js=0.3, images=(1000, 500, 50), disagree=0.7)
    assert recommend(strong, {})["first"] == recommend(measured(), {})["first"] == []
    found = recommend(strong, {name: kind.skews for name, kind in METHODS.items()})
    named = {name for one in found["kinds"] for name in one["methods"]} | set(found["first"])
    assert named <= set(METHODS)
    assert len(found["first"]) <= MOST_FIRST
    assert "isolated" not in named


def test_every_method_speaks_of_known_kinds_of_skew() -> None:
    assert {kind for method in METHODS.values() for kind in method.skews} <= set(FAMILIES)


def test_advice_gives_its_figures_and_says_what_it_is() -> None:
    found = recommend(measured(same=0.4123, p=0.001, images=(1000, 500, 30)), MADE_UP)
    text = "\n".join(found["text"])
    for part in (
        "Feature skew is strong: mean MMD at equal labels 0.41; features differ for 3 of 3 pairs",
        "; some begins at 0.1, strong at 0.2.",
        "or align features: norms, align.",
        "Label skew is little",
        "1 of 3 clients lack a class",
        "33.3 times the images of the smallest",
        f"Fewer than {FEW_PER_CLASS} images a class at c: share more",
        "Worth trying first: norms (feature), prox (label, quantity), align (feature, label), beside isolated and",
    ):
        assert part in text, part
    assert "rule of thumb" in found["text"][-1]
    assert "Methods that correct loss" not in text, "nothing is proposed against skew that is little"


def test_class_weights_come_before_corrected_logits() -> None:
    """That is what our own study found, against what the authors of the latter claim."""
    text = "\n".join(recommend(measured(js=0.4), MADE_UP)["text"])
    assert "federated averaging with class weights" in text
    assert "class weights" not in "\n".join(recommend(measured(same=0.5, p=0.001), MADE_UP)["text"])


def test_nothing_registered_addresses_it() -> None:
    found = recommend(measured(disagree=0.7), {"isolated": (), "norms": ("feature",)})
    assert "No method addresses what is strong here, beside isolated." in found["text"]


def brighter(name: str, shift: int, counts: tuple[int, int], seed: int) -> ClientData:
    """A client whose second class is brighter than the first, and all of whose images are brighter by `shift`."""
    rng = np.random.default_rng(seed)
    labels = np.repeat([0, 1], counts)
    level = 60 + shift + 30 * labels[:, None, None, None]
    images = np.clip(rng.normal(level, 10, (len(labels), 4, 4, 1)), 0, 255).astype(np.uint8)
    whole = samples(images, labels, [f"{name}-{i}" for i in range(len(labels))])
    return ClientData(name, whole, whole.take([]), whole.take([]))


def pixels(images: Samples) -> np.ndarray:
    """Pixels as features."""
    return images.images.reshape(len(images), -1).astype(np.float32)


@pytest.mark.parametrize(("shift", "counts", "kinds"), [(60, (40, 40), {"feature"}), (0, (8, 72), {"label"})])
def test_from_images_to_advice(shift: int, counts: tuple[int, int], kinds: set[str]) -> None:
    """A brighter scanner is feature skew and no label skew; other labels the other way round."""
    clients = (brighter("a", 0, (40, 40), 0), brighter("b", shift, counts, 1))
    skew = analyse_skew(Federation(clients, ("x", "y"), "made up"), pixels, seed=0, permutations=99)
    found = recommend(skew, MADE_UP)
    assert {one["kind"] for one in found["kinds"] if one["level"] == "strong"} == kinds
    json.dumps(found, allow_nan=False)


def test_nobody_has_images() -> None:
    nobody = Federation((brighter("a", 0, (0, 0), 0), brighter("b", 0, (0, 0), 1)), ("x", "y"), "empty")
    found = recommend(analyse_skew(nobody, pixels, seed=0), MADE_UP)
    assert {one["level"] for one in found["kinds"]} == {"unknown"}


def test_the_report_gives_the_advice(tmp_path: Path) -> None:
    clients = (brighter("a", 0, (40, 40), 0), brighter("b", 60, (40, 40), 1))
    skew = analyse_skew(Federation(clients, ("x", "y"), "made up"), pixels, seed=0, permutations=19)
    folder = write_compare(tmp_path / "compare", seeds=(0,))
    (folder / "skew").mkdir()
    (folder / "skew" / "skew.json").write_text(json.dumps(skew))
    assert "What these differences suggest" not in write_report(folder).read_text(), "an older file has no advice"
    (folder / "skew" / "skew.json").write_text(json.dumps(skew | {"recommendation": recommend(skew, MADE_UP)}))
    assert "Worth trying first: norms (feature), align (feature, label)" in write_report(folder).read_text()


def test_methods_on_text_are_only_advised_on_an_encoder() -> None:
    named = {
        name
        for kind in measure_skew(tiny(), read_federation(tiny().data, 0), permutations=20)["recommendation"]["kinds"]
        for name in kind["methods"]
    }
    assert named, "the tiny federation is skewed"
    assert not named & {name for name, kind in METHODS.items() if kind.needs_text}
    assert METHODS["fedmedclip"].needs_text
    assert METHODS["facmic"].needs_text
    assert has_text("bridge:lite0-minilm")
    assert has_text("open_clip:ViT-B-32/openai")
    assert not has_text("timm:resnet18")


@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind.needs_text])
def test_a_method_that_needs_text_says_so_on_a_network_without(name: str) -> None:
    kind = METHODS[name]
    with pytest.raises(InputError, match=f"has no text side, which {re.escape(name)} needs"):
        Network("wardround:resnet4-lib", 32, 0).model(kind())
