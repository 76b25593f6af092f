"""The paired bootstrap and the comparison of methods, against analytic values and known truths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wardround.errors import InputError
from wardround.evaluation import bootstrap
from wardround.evaluation.bootstrap import MEASURES, draw
from wardround.evaluation.metrics import from_confusion, merge_confusions
from wardround.evaluation.predictions import align, read_predictions
from wardround.evaluation.significance import (
    compare_methods,
    holm,
    paired_bootstrap,
    sentence,
    smallest_detectable_difference,
    verdict,
    wilcoxon_test,
)

Entry = tuple[np.ndarray, np.ndarray]


def logits_of(predicted: np.ndarray, classes: int) -> np.ndarray:
    """Logits whose argmax is `predicted`."""
    return np.eye(classes, dtype=np.float32)[predicted]


def noisy(labels: np.ndarray, classes: int, skill: float, rng: np.random.Generator) -> Entry:
    """Predictions that are right with probability `skill` and else another class."""
    wrong = (labels + rng.integers(1, classes, len(labels))) % classes
    predicted = np.where(rng.random(len(labels)) < skill, labels, wrong)
    return labels, logits_of(predicted, classes)


def runs(skill: float, *, seed: int, sizes: dict[str, int], seeds: int = 3, classes: int = 4) -> dict[int, Any]:
    """A method's predictions: the same labels for all methods, its own errors."""
    truth = {name: np.random.default_rng(i).integers(0, classes, n) for i, (name, n) in enumerate(sizes.items())}
    rng = np.random.default_rng([seed, 1])
    return {s: {name: noisy(y, classes, skill, rng) for name, y in truth.items()} for s in range(seeds)}


SIZES = {"big": 600, "small": 200}
WEIGHTS = {"big": 300.0, "small": 100.0}


def test_observed_values_are_the_metrics() -> None:
    """Row 0 of the draws equals the summary computed from confusion matrices."""
    methods = {"x": runs(0.7, seed=1, sizes=SIZES), "y": runs(0.5, seed=2, sizes=SIZES)}
    drawn = draw(align(methods), WEIGHTS, 10, 0)
    for i, each in enumerate(methods.values()):
        confusions = {s: {k: confusion(*entry) for k, entry in run.items()} for s, run in each.items()}
        scores = [{k: recall_mean(c) for k, c in run.items()} for run in confusions.values()]
        expected = {
            "unweighted_average": np.mean([np.mean(list(run.values())) for run in scores]),
            "weighted_average": np.mean([0.75 * run["big"] + 0.25 * run["small"] for run in scores]),
            "pooled_balanced_accuracy": np.mean(
                [recall_mean(np.array(merge_confusions(run.values()))) for run in confusions.values()]
            ),
        }
        for measure in MEASURES:
            assert drawn.measures[measure][0, i] == pytest.approx(expected[measure])


def confusion(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Confusion matrix by a plain loop."""
    counts = np.zeros((logits.shape[1],) * 2, dtype=int)
    for truth, row in zip(labels, logits, strict=True):
        counts[truth, row.argmax()] += 1
    return counts


def recall_mean(counts: np.ndarray) -> float:
    """Balanced accuracy of a confusion matrix."""
    return from_confusion(counts)["balanced_accuracy"] or 0.0


def test_standard_error_agrees_with_the_analytic_one() -> None:
    """One client, one seed, C balanced classes: SE^2 = sum_c var_c(a - b) / n_c / C^2."""
    labels = np.repeat(np.arange(4), 100)
    rng = np.random.default_rng(3)
    a, b = ({0: {"k": noisy(labels, 4, skill, rng)}} for skill in (0.7, 0.6))
    gap = (a[0]["k"][1].argmax(1) == labels).astype(float) - (b[0]["k"][1].argmax(1) == labels)
    expected = np.sqrt(np.sum([gap[labels == c].var() / 100 for c in range(4)])) / 4
    found = paired_bootstrap(a, b, weights={"k": 1}, draws=4000)
    for measure in MEASURES:
        assert found[measure]["standard_error"] == pytest.approx(expected, rel=0.06)
        assert found[measure]["difference"] == pytest.approx(gap.mean())
        width = found[measure]["high"] - found[measure]["low"]
        assert width == pytest.approx(2 * 1.96 * expected, rel=0.1)


def test_seeds_add_their_variance() -> None:
    """Where seeds differ and images do not matter, SE^2 = var over seeds (ddof 0) / number of seeds."""
    labels = np.zeros(50, dtype=int)
    shares = {0: 0, 1: 25, 2: 50, 3: 50}
    a = {s: {"k": (labels, logits_of((np.arange(50) >= n).astype(int), 2))} for s, n in shares.items()}
    b = {s: {"k": (labels, logits_of(labels, 2))} for s in shares}
    found = paired_bootstrap(a, b, weights={"k": 1}, draws=4000)["unweighted_average"]
    values = np.array([-1.0, -0.5, 0.0, 0.0])
    # The images of seed 1 vary as well: .25/50 there, averaged over four seeds (crossed, so a little more).
    assert found["difference"] == pytest.approx(values.mean())
    assert found["standard_error"] == pytest.approx(np.sqrt(values.var() / 4), rel=0.06)


def test_known_difference_is_detected() -> None:
    good, bad = runs(0.8, seed=1, sizes=SIZES), runs(0.6, seed=2, sizes=SIZES)
    for found in paired_bootstrap(good, bad, weights=WEIGHTS, draws=500).values():
        assert 0.1 < found["low"] < found["difference"] < found["high"] < 0.3
        assert found["p"] == pytest.approx(2 / 501)


def test_no_difference_is_covered() -> None:
    """Over repeated experiments without a difference, about 95 % of intervals cover 0."""
    covered = 0
    for trial in range(40):
        a = runs(0.7, seed=100 + trial, sizes=SIZES, seeds=5)
        b = runs(0.7, seed=500 + trial, sizes=SIZES, seeds=5)
        found = paired_bootstrap(a, b, weights=WEIGHTS, draws=200, seed=trial)["unweighted_average"]
        covered += found["low"] <= 0 <= found["high"]
    assert covered >= 34


def test_same_predictions_differ_in_no_draw() -> None:
    a = runs(0.7, seed=1, sizes=SIZES)
    for found in paired_bootstrap(a, a, weights=WEIGHTS, draws=50).values():
        assert (found["difference"], found["low"], found["high"], found["p"]) == (0, 0, 0, 1)


def test_pairing_narrows_the_interval() -> None:
    """Methods that err on the same images are compared more sharply than each is measured."""
    a = runs(0.6, seed=1, sizes={"k": 400}, seeds=1)
    labels, logits = a[0]["k"]
    better = logits.copy()
    wrong = np.flatnonzero(logits.argmax(1) != labels)[:10]
    better[wrong] = np.eye(4)[labels[wrong]]
    found = compare_methods({"a": a, "b": {0: {"k": (labels, better)}}}, {"k": 1}, draws=500)
    own = found["methods"]["a"]["unweighted_average"]["standard_error"]
    paired = found["pairs"][0]["measures"]["unweighted_average"]["standard_error"]
    assert paired < own / 2
    assert found["pairs"][0]["verdict"] == "worse"


def test_class_that_vanishes_is_skipped() -> None:
    """Class 1 has one image, always missed: BA is .5 in draws that have it and 1 in those that do not."""
    labels = np.array([0] * 9 + [1])
    entry = (labels, logits_of(np.zeros(10, dtype=int), 2))
    drawn = draw(align({"x": {0: {"k": entry}}}), {"k": 1}, 4000, 0)
    values = drawn.clients["k"][1:, 0]
    assert set(np.unique(values)) == {0.5, 1.0}
    assert (values == 1.0).mean() == pytest.approx(0.9**10, abs=0.03)


def test_result_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = runs(0.7, seed=1, sizes=SIZES), runs(0.6, seed=2, sizes=SIZES)
    whole = paired_bootstrap(a, b, weights=WEIGHTS, draws=60)
    monkeypatch.setattr(bootstrap, "CHUNK", 7 * 600)
    assert paired_bootstrap(a, b, weights=WEIGHTS, draws=60) == whole


def test_splits_that_depend_on_the_seed_are_resampled_apart() -> None:
    rng = np.random.default_rng(0)
    splits = [rng.integers(0, 3, n) for n in (30, 40)]
    a, b = ({s: {"k": noisy(labels, 3, skill, rng)} for s, labels in enumerate(splits)} for skill in (0.9, 0.3))
    aligned = align({"a": a, "b": b})
    assert [len(block.labels) for block in aligned.clients["k"]] == [30, 40]
    found = paired_bootstrap(a, b, weights={"k": 1}, draws=300)["pooled_balanced_accuracy"]
    assert any("differ between seeds" in n for n in compare_methods({"a": a}, {"k": 1}, draws=9)["notes"])
    expected = [recall_mean(confusion(*a[s]["k"])) - recall_mean(confusion(*b[s]["k"])) for s in (0, 1)]
    assert found["difference"] == pytest.approx(np.mean(expected))
    assert found["low"] > 0


def test_smallest_difference_is_2_8_standard_errors() -> None:
    assert smallest_detectable_difference(0.01) == pytest.approx(0.0280, abs=5e-5)
    assert smallest_detectable_difference(1, level=0.99, power=0.5) == pytest.approx(2.5758, abs=1e-4)


def test_smallest_difference_is_found_four_times_in_five() -> None:
    """Simulated: at a true difference of 2.80 standard errors, |estimate| > 1.96 SE in 80 % of tests."""
    estimates = np.random.default_rng(0).normal(smallest_detectable_difference(1.0), 1.0, 40_000)
    assert (np.abs(estimates) > 1.95996).mean() == pytest.approx(0.80, abs=0.01)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_verdict_rests_on_the_corrected_p() -> None:
    found = {"difference": 0.02, "low": 0.001, "high": 0.04, "standard_error": 0.01}
    found |= {"p": 0.04, "p_holm": 0.08, "smallest_difference": 0.028}
    assert verdict(found) == "not distinguishable"
    assert sentence("x", "y", found) == (
        "x and y are not distinguishable on this test set: difference +2.0 points (95 % interval +0.1 to +4.0, "
        "corrected p 0.08); a true difference of 2.8 points would be found four times in five."
    )
    clear = {**found, "difference": -0.02, "low": -0.04, "high": -0.001, "p_holm": 0.04}
    assert verdict(clear) == "worse"
    assert sentence("x", "y", clear).startswith("x is worse than y by 2.0 points (95 % interval -4.0 to -0.1")


def test_wilcoxon_by_hand() -> None:
    """Five pairs all in one direction: exact two-sided p = 2 / 2^5. Zeros are left out."""
    base = np.array([0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    found = wilcoxon_test(base + np.array([0.01, 0.02, 0.03, 0.04, 0.05, 0.0]), base)
    assert found["p"] == pytest.approx(2 / 32)
    assert (found["pairs"], found["nonzero_pairs"]) == (6, 5)
    assert found["median_difference"] == pytest.approx(0.025)
    assert wilcoxon_test(base, base)["p"] == 1.0


def comparison(**options: Any) -> dict[str, Any]:
    """Three methods, one of them plainly worse."""
    methods = {
        "isolated": runs(0.5, seed=1, sizes=SIZES),
        "pafp": runs(0.75, seed=2, sizes=SIZES),
        "ft-2B": runs(0.75, seed=3, sizes=SIZES),
    }
    return compare_methods(methods, WEIGHTS, draws=400, **options)


def test_comparison_is_plain_json_and_repeats() -> None:
    found = comparison()
    assert json.loads(json.dumps(found, allow_nan=False)) == comparison()
    assert comparison(seed=1)["pairs"] != found["pairs"]


def test_comparison_against_the_best() -> None:
    found = comparison()
    best = max(found["methods"], key=lambda name: found["methods"][name]["unweighted_average"]["value"])
    assert found["reference"] == best
    verdicts = {pair["method"]: pair["verdict"] for pair in found["pairs"]}
    assert verdicts.pop("isolated") == "worse"
    assert set(verdicts.values()) == {"not distinguishable"}
    sentences = {pair["method"]: pair["sentence"] for pair in found["pairs"]}
    assert "isolated is worse than" in sentences.pop("isolated")
    assert "not distinguishable on this test set" in next(iter(sentences.values()))


def test_comparison_figures_agree_with_each_other() -> None:
    found = comparison(reference="isolated")
    assert [pair["method"] for pair in found["pairs"]] == ["pafp", "ft-2B"]
    matrix, value = (
        found["matrix"]["unweighted_average"],
        found["methods"]["pafp"]["unweighted_average"]["value"],
    )
    pair = found["pairs"][0]["measures"]["unweighted_average"]
    place = found["matrix"]["labels"].index
    assert pair["difference"] == matrix["difference"][place("pafp")][place("isolated")]
    assert pair["difference"] == pytest.approx(value - found["methods"]["isolated"]["unweighted_average"]["value"])
    assert np.array(matrix["difference"]) == pytest.approx(-np.array(matrix["difference"]).T)
    assert pair["p_holm"] == pytest.approx(2 * pair["p"])
    upper = np.array(matrix["smallest_difference"])[np.triu_indices(3, 1)]
    assert found["smallest_difference"]["unweighted_average"] == pytest.approx(np.median(upper))
    assert found["test_images"] == SIZES
    assert found["pairs"][0]["wilcoxon"]["pairs"] == 6


def test_one_method_alone_has_intervals_and_no_pair() -> None:
    found = compare_methods({"x": runs(0.7, seed=1, sizes=SIZES, seeds=1)}, WEIGHTS, draws=50)
    assert found["pairs"] == []
    assert found["smallest_difference"]["unweighted_average"] is None
    own = found["methods"]["x"]["clients"]["small"]
    assert own["low"] < own["value"] < own["high"]
    assert any("One seed" in note for note in found["notes"])


def test_seeds_that_some_method_lacks_are_left_out() -> None:
    found = compare_methods(
        {"x": runs(0.7, seed=1, sizes=SIZES, seeds=3), "y": runs(0.7, seed=2, sizes=SIZES, seeds=2)},
        WEIGHTS,
        draws=20,
    )
    assert found["seeds"] == [0, 1]
    assert any("Seeds [2]" in note for note in found["notes"])


def test_client_without_test_images_is_left_out() -> None:
    sizes = {"k": 50, "empty": 0}
    found = compare_methods({"x": runs(0.7, seed=1, sizes=sizes)}, {"k": 1.0, "empty": 5.0}, draws=20)
    assert found["test_images"] == {"k": 50}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"other": runs(0.7, seed=2, sizes={"big": 10})}, "'other', seed 0: clients"),
        ({"other": runs(0.7, seed=2, sizes={"big": 10, "small": 200})}, "client 'big': the test images"),
        ({"other": {7: runs(0.7, seed=2, sizes=SIZES)[0]}}, "no seed in common"),
    ],
)
def test_methods_on_other_images_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compare_methods({"x": runs(0.7, seed=1, sizes=SIZES), **change}, WEIGHTS)


def test_bad_requests_are_refused() -> None:
    methods = {"pafp": runs(0.7, seed=1, sizes=SIZES)}
    with pytest.raises(InputError, match=r"unknown reference method 'pafb' \(did you mean 'pafp'\?\)"):
        compare_methods(methods, WEIGHTS, reference="pafb", draws=5)
    with pytest.raises(InputError, match="draws must be at least 2"):
        compare_methods(methods, WEIGHTS, draws=1)
    with pytest.raises(InputError, match=r"no weight for clients \['small'\]"):
        compare_methods(methods, {"big": 1.0}, draws=5)
    with pytest.raises(InputError, match="more than 0"):
        compare_methods(methods, dict.fromkeys(WEIGHTS, 0.0), draws=5)
    with pytest.raises(InputError, match="no method"):
        compare_methods({}, WEIGHTS)


def test_stored_predictions_line_up_by_name(tmp_path: Path) -> None:
    """Two runs that stored the same images in another order are read into the same order."""
    for folder, order in (("one", [0, 1, 2]), ("two", [2, 0, 1])):
        (tmp_path / folder / "predictions").mkdir(parents=True)
        names, labels = np.array(["p1", "p2", "p3"])[order], np.array([0, 1, 1])[order]
        logits = np.arange(6, dtype=np.float32).reshape(3, 2)[order]
        np.savez(tmp_path / folder / "predictions" / "k.npz", names=names, labels=labels, personal=logits)
    one, two = read_predictions(tmp_path / "one")["k"], read_predictions(tmp_path / "two")["k"]
    assert np.array_equal(one[0], two[0])
    assert np.array_equal(one[1], two[1])
    with pytest.raises(InputError, match="no array 'received'"):
        read_predictions(tmp_path / "one", "received")
    with pytest.raises(InputError, match="no predictions"):
        read_predictions(tmp_path)
