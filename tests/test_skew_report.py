"""Label, quantity and concept skew against hand values, and the whole report on a small federation."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest

from wardround.data.federation import ClientData, Federation, Samples, samples
from wardround.errors import InputError
from wardround.skew.analyse import analyse_skew, skew_text
from wardround.skew.concept import disagreement, disagreement_matrix
from wardround.skew.labels import (
    effective_number,
    imbalance,
    jensen_shannon_matrix,
    label_distribution,
    quantity_shares,
)

COUNTS = np.array([[8, 0], [0, 4], [2, 2], [0, 0]])


def test_shares_by_hand() -> None:
    shares = label_distribution(COUNTS)
    assert shares[:3].tolist() == [[1, 0], [0, 1], [0.5, 0.5]]
    assert np.isnan(shares[3]).all()
    assert quantity_shares(COUNTS).tolist() == [0.5, 0.25, 0.25, 0]
    assert np.isnan(quantity_shares(np.zeros((2, 2)))).all()


def test_jensen_shannon_by_hand() -> None:
    """Disjoint: 1 bit. (1, 0) against (1/2, 1/2): H(3/4, 1/4) - (0 + 1) / 2."""
    found = jensen_shannon_matrix(label_distribution(COUNTS))
    middle = -(0.75 * np.log2(0.75) + 0.25 * np.log2(0.25))
    assert found[0, 1] == pytest.approx(1)
    assert found[0, 2] == pytest.approx(middle - 0.5)
    assert np.array_equal(np.diag(found)[:3], np.zeros(3))
    assert np.isnan(found[3]).all()
    assert np.isnan(found[:, 3]).all()


def test_jensen_shannon_agrees_with_scipy() -> None:
    from scipy.spatial.distance import jensenshannon

    shares = np.random.default_rng(0).dirichlet(np.ones(6), 2)
    expected = jensenshannon(shares[0], shares[1], base=2) ** 2
    assert jensen_shannon_matrix(shares)[0, 1] == pytest.approx(expected)


def test_effective_number_and_imbalance() -> None:
    assert effective_number(np.array([[0.25] * 4, [1, 0, 0, 0]])).tolist() == [4, 1]
    assert effective_number(np.array([0.75, 0.25])) == pytest.approx(4 / 3**0.75)
    assert imbalance(np.array([[6, 3, 0], [5, 0, 0]])).tolist() == [2, 1]
    assert np.isnan(imbalance(COUNTS)[3])


def blobs(centres: list[float], n: int, seed: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """`n` tight points around each centre on a line, their label the centre's place."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(centres)), n)
    return (np.array(centres)[labels] + shift + rng.normal(0, 0.1, len(labels)))[:, None], labels


def test_same_concept_under_an_offset_agrees() -> None:
    a, b = blobs([0, 1, 2], 20, 0), blobs([0, 1, 2], 20, 1, shift=50)
    assert disagreement(*a, *b) == 0


def test_swapped_labels_disagree() -> None:
    """Classes 0 and 1 change places at the second client: two of three classes disagree."""
    a, b = blobs([0, 1, 2], 20, 0), blobs([1, 0, 2], 20, 1)
    assert disagreement(*a, *b) == pytest.approx(2 / 3)


def test_disagreement_is_over_common_classes() -> None:
    """Class 2 is missing at the second client, and rare classes do not count; one common class is not enough."""
    a, (rows, labels) = blobs([0, 1, 7], 20, 0), blobs([0, 1], 20, 1)
    assert disagreement(*a, rows, labels) == 0
    assert np.isnan(disagreement(*a, rows[:23], labels[:23]))


def test_diagonal_is_the_disagreement_of_halves() -> None:
    """None for classes far apart; a good deal for labels that have nothing to do with the features."""
    rows, labels = blobs([0, 1], 20, 0)
    noise = np.random.default_rng(0).normal(size=(40, 3))
    assert disagreement_matrix({"easy": rows}, {"easy": labels}, 0)[0, 0] == 0
    assert disagreement_matrix({"noise": noise}, {"noise": labels}, 0)[0, 0] > 0.1


def client(name: str, counts: list[int], brightness: float, seed: int) -> ClientData:
    """A client whose images are noise around a brightness; classes differ a little."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    level = brightness + 8 * labels[:, None, None, None]
    images = np.clip(rng.normal(level, 10, (len(labels), 4, 4, 1)), 0, 255).astype(np.uint8)
    whole = samples(images, labels, [f"{name}-{i}" for i in range(len(labels))])
    return ClientData(name, whole, whole.take([]), whole.take(range(min(3, len(labels)))))


def features_of(images: Samples) -> np.ndarray:
    """Pixels as features."""
    return images.images.reshape(len(images), -1).astype(np.float32)


def federation() -> Federation:
    """Two like clients, a brighter one with other labels, one without images."""
    clients = (
        client("like", [40, 40], 60, 0),
        client("alike", [30, 30], 60, 1),
        client("bright", [5, 40], 150, 2),
        client("empty", [0, 0], 60, 3),
    )
    return Federation(clients, ("benign", "malignant"), "made up")


def analysed(**options: Any) -> dict[str, Any]:
    """The report on `federation()`."""
    return analyse_skew(federation(), features_of, **{"seed": 0, "permutations": 99, **options})


def test_report_tells_like_from_unlike() -> None:
    found = analysed()
    mmd, p = found["feature"]["mmd"], found["feature"]["p_values"]
    assert mmd[0][1] < mmd[0][2] / 3
    assert p[0][1] > 0.05
    assert p[0][2] == p[1][2] == 0.01
    assert found["label"]["jensen_shannon"][0][1] == 0
    assert found["label"]["jensen_shannon"][0][2] > 0.1
    assert found["quantity"]["images"] == [80, 60, 45, 0]
    assert found["label"]["absent"] == [[], [], [], ["benign", "malignant"]]
    assert found["feature"]["triangle_violations"]["biased, root, global bandwidth"] == 0
    assert found["feature"]["ordered_triples"] == 6


def test_report_is_plain_json_and_repeats() -> None:
    text = json.dumps(analysed(), allow_nan=False)
    assert text == json.dumps(analysed(), allow_nan=False)
    assert json.loads(text)["feature"]["mmd"][3] == [None] * 4


def test_cap_on_images_is_kept_and_does_not_touch_counts() -> None:
    found = analysed(max_images=50)
    assert found["feature"]["images"] == [50, 50, 45, 0]
    assert found["quantity"]["images"] == [80, 60, 45, 0]


def test_split_and_variant_are_the_caller_s() -> None:
    found = analysed(split="test", estimator="unbiased", squared=True, bandwidth="pair")
    assert found["feature"]["images"] == [3, 3, 3, 0]
    assert (found["feature"]["estimator"], found["feature"]["bandwidth"]) == ("unbiased", "pair")
    assert analysed()["feature"]["mmd"][0][2] ** 2 == pytest.approx(analysed(squared=True)["feature"]["mmd"][0][2])


def test_bad_requests_are_refused() -> None:
    with pytest.raises(InputError, match="max_images must be at least 2"):
        analysed(max_images=1)
    with pytest.raises(ValueError, match="features of 'like' must be finite"):
        analyse_skew(federation(), lambda images: features_of(images)[:1], seed=0)


def test_nobody_has_images() -> None:
    nobody = Federation((client("a", [0, 0], 0, 0), client("b", [0, 0], 0, 0)), ("x", "y"), "empty")
    found = analyse_skew(nobody, features_of, seed=0)
    assert found["feature"]["gamma"] is None
    assert found["quantity"]["effective_clients"] is None
    json.dumps(found, allow_nan=False)
    assert "made" not in printed(found)


def printed(found: dict[str, Any]) -> str:
    """The report as the terminal shows it."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=160).print(skew_text(found))
    return out.getvalue()


def test_terminal_shows_clients_matrices_and_notes() -> None:
    text = printed(analysed())
    for part in ("made up, train images", "bright", "43.2%", "biased, root, global bandwidth", "–", "0.010"):
        assert part in text, part


def test_large_federations_show_extremes() -> None:
    many = Federation(tuple(client(f"c{i}", [6, 6], 60 + 40 * (i == 0), i) for i in range(13)), ("x", "y"), "many")
    text = printed(analyse_skew(many, features_of, seed=0, permutations=5))
    line = next(line for line in text.splitlines() if line.startswith("Feature distance"))
    assert "(c0, c" in line.split(" to ")[1]
