"""Summaries, mergers and the paper's table against hand-computed values."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest

from wardround.errors import InputError
from wardround.evaluation.metrics import Metrics, evaluate_probabilities
from wardround.evaluation.results import client_results, over_seeds
from wardround.evaluation.tables import Table, merge_results, results_table, summarise, to_rich


def metrics(right: int, wrong: int, other_right: int = 0, other_wrong: int = 0) -> Metrics:
    """Metrics of a model with the given numbers of right and wrong answers in class 0 and in class 1."""
    labels = [0] * (right + wrong) + [1] * (other_right + other_wrong)
    answers = [0] * right + [1] * wrong + [1] * other_right + [0] * other_wrong
    sure = 0.1 + 0.8 * np.eye(2)
    return evaluate_probabilities(sure[np.array(answers, dtype=int)], np.array(labels, dtype=int))


RUNS = {  # balanced accuracy: a .75 then .5; b .5 then 1
    "a": [metrics(2, 0, 1, 1), metrics(1, 1, 1, 1)],
    "b": [metrics(1, 1), metrics(2, 0)],
}
WEIGHTS = {"a": 300.0, "b": 100.0}


def result(label: str, scores: dict[str, float], *, seed: int = 0, method: str = "fedavg") -> dict[str, Any]:
    """A single-seed `results.json` with the given balanced accuracies and equal weights."""
    values = np.array(list(scores.values()))
    clients = {
        name: {
            "n_train": 10,
            "n_test": 4,
            **{key: [score] for key in ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "ece")},
            "support": [2, 2],
        }
        for name, score in scores.items()
    }
    figures = {
        "weighted_average": values.mean(),
        "unweighted_average": values.mean(),
        "inter_client_variance": values.var(),
        "worst_client": values.min(),
        "pooled_balanced_accuracy": values.mean(),
    }
    return {
        "method": method,
        "label": label,
        "seeds": [seed],
        "rounds": 3,
        "clients": clients,
        "summary": {name: {"mean": float(value), "std": 0.0} for name, value in figures.items()},
        "global": None,
        "communication": {"bytes_up": 100 + seed, "bytes_down": 7, "shared_elements": 5},
        "seconds": {"train": 1.0 + seed},
        "warnings": ["small site"],
    }


def test_summary_by_hand() -> None:
    found = summarise(RUNS, WEIGHTS)
    assert found["weighted_average"]["mean"] == pytest.approx(((0.75 * 3 + 0.5) / 4 + (0.5 * 3 + 1) / 4) / 2)
    assert found["unweighted_average"] == pytest.approx({"mean": 0.6875, "std": 0.125 / np.sqrt(2)})
    # ddof 0 within a run: (.125)^2 and (.25)^2; then mean, and ddof 1 over the two seeds.
    low, high = 0.125**2, 0.25**2
    assert found["inter_client_variance"]["mean"] == pytest.approx((low + high) / 2)
    assert found["inter_client_variance"]["std"] == pytest.approx((high - low) / np.sqrt(2))
    assert found["worst_client"] == pytest.approx({"mean": 0.5, "std": 0.0})
    # Pooled: class 0 has 3 of 4 right, then 3 of 4; class 1 has 1 of 2 right in both.
    assert found["pooled_balanced_accuracy"] == pytest.approx({"mean": 0.625, "std": 0.0})


def test_one_seed_has_no_spread() -> None:
    found = summarise({name: runs[:1] for name, runs in RUNS.items()}, WEIGHTS)
    assert found["unweighted_average"] == {"mean": 0.625, "std": 0.0}


def test_client_without_test_images_is_left_out() -> None:
    found = summarise({"a": [metrics(2, 0, 1, 1)], "empty": [metrics(0, 0)]}, {"a": 1.0, "empty": 9.0})
    assert found["weighted_average"]["mean"] == pytest.approx(0.75)
    assert found["inter_client_variance"]["mean"] == 0.0
    nothing = summarise({"empty": [metrics(0, 0)]}, {"empty": 9.0})
    assert nothing["worst_client"] == {"mean": None, "std": None}


def test_zero_weights_leave_the_weighted_average_undefined() -> None:
    found = summarise(RUNS, {"a": 0.0, "b": 0.0})
    assert found["weighted_average"]["mean"] is None
    assert found["unweighted_average"]["mean"] is not None


def test_seeds_must_match_between_clients() -> None:
    with pytest.raises(ValueError, match="number of seeds"):
        summarise({"a": RUNS["a"], "b": RUNS["b"][:1]}, WEIGHTS)


def test_over_seeds_leaves_undefined_seeds_out() -> None:
    assert over_seeds([0.2, None, 0.4]) == pytest.approx({"mean": 0.3, "std": 0.2 / np.sqrt(2)})
    assert over_seeds([None]) == {"mean": None, "std": None}


def test_client_entry_lists_each_seed() -> None:
    entry = client_results(RUNS["a"], n_train=300)
    assert (entry["n_train"], entry["n_test"], entry["support"]) == (300, 4, [2, 2])
    assert entry["balanced_accuracy"] == [0.75, 0.5]
    assert client_results([metrics(2, 0)], 5)["auroc"] == [None]


def test_merged_seeds_equal_their_joint_summary() -> None:
    """Merging single-seed files gives what summarising all seeds at once gives, in the order of seeds."""
    joint = {**result("x", {"a": 0.1, "b": 0.1}), "summary": summarise(RUNS, WEIGHTS)}
    singles = []
    for i in (1, 0):
        clients = {name: client_results([runs[i]], 10) for name, runs in RUNS.items()}
        part = {name: [runs[i]] for name, runs in RUNS.items()}
        singles.append({**joint, "seeds": [i], "clients": clients, "summary": summarise(part, WEIGHTS)})
    merged = merge_results(singles)
    assert merged["seeds"] == [0, 1]
    assert merged["clients"]["b"]["balanced_accuracy"] == [0.5, 1.0]
    for name, spread in joint["summary"].items():
        assert merged["summary"][name] == pytest.approx(spread), name


def test_merge_of_bytes_seconds_and_warnings() -> None:
    parts = [result("x", {"a": 0.5}, seed=seed) for seed in (0, 2)]
    parts[1]["warnings"] = ["small site", "slow"]
    for part in parts:
        part["global"] = {"clients": part["clients"], "summary": part["summary"]}
    merged = merge_results(parts)
    assert merged["communication"] == {"bytes_up": 101, "bytes_down": 7, "shared_elements": 5}
    assert merged["seconds"] == {"train": 2.0}
    assert merged["warnings"] == ["small site", "slow"]
    assert merged["global"]["clients"]["a"]["accuracy"] == [0.5, 0.5]
    assert merged["global"]["summary"]["worst_client"] == {"mean": 0.5, "std": 0.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "y"}, "label is 'x' and 'y'"),
        ({"method": "pafp"}, "method is"),
        ({"rounds": 4}, "rounds is 3 and 4"),
        ({"seeds": [0]}, "a seed occurs twice"),
        ({"seeds": [1, 2]}, "only results of one seed"),
        ({"clients": {}}, "clients is"),
    ],
)
def test_what_does_not_belong_together_is_refused(change: dict[str, Any], message: str) -> None:
    parts = [result("x", {"a": 0.5}, seed=0), {**result("x", {"a": 0.5}, seed=1), **change}]
    with pytest.raises(InputError, match=message):
        merge_results(parts)


def paper_table() -> Table:
    """Isolated (best of all on client a) and three federated methods."""
    return results_table(
        [
            result("isolated", {"a": 0.99, "b": 0.30}, method="isolated"),
            result("fedavg", {"a": 0.60, "b": 0.70}),
            result("pafp", {"a": 0.80, "b": 0.60}),
            result("pafp-alt", {"a": 0.8001, "b": 0.50}),
        ]
    )


def test_table_ranks_federated_methods_only() -> None:
    table = paper_table()
    headings = [column.heading for column in table.columns]
    ranks = {row.label: dict(zip(headings, (cell.rank for cell in row.cells), strict=True)) for row in table.rows}
    assert headings[:5] == ["a", "b", "weighted avg.", "unweighted avg.", "variance"]
    assert set(ranks["isolated"].values()) == {None}
    # .80 and .8001 both read 80.0: both are best, and .60 is second.
    assert [ranks[name]["a"] for name in ("fedavg", "pafp", "pafp-alt")] == [2, 1, 1]
    assert [ranks[name]["b"] for name in ("fedavg", "pafp", "pafp-alt")] == [1, 2, None]
    assert [ranks[name]["variance"] for name in ("fedavg", "pafp", "pafp-alt")] == [1, 2, None]


def test_cells_show_percent_and_squared_points() -> None:
    merged = merge_results([result("x", {"a": s, "b": s + 0.2}, seed=i) for i, s in enumerate((0.5, 0.6))])
    cells = results_table([merged]).rows[0].cells
    assert cells[0].text == "55.0 ± 7.1"
    assert cells[4].text == "100.0 ± 0.0"
    assert results_table([result("x", {"a": 0.5})]).rows[0].cells[0].text == "50.0"


def test_isolated_stands_first_and_apart() -> None:
    results = [result("fedavg", {"a": 0.5}), result("isolated", {"a": 0.6}, method="isolated")]
    rows = results_table(results).rows
    assert [(row.label, row.ranked) for row in rows] == [("isolated", False), ("fedavg", True)]


def test_undefined_figures_are_dashes() -> None:
    empty = result("x", {"a": 0.5, "b": 0.5})
    empty["clients"]["b"]["balanced_accuracy"] = [None]
    cell = results_table([empty]).rows[0].cells[1]
    assert (cell.text, cell.mean, cell.rank) == ("–", None, None)


def test_global_table_leaves_out_methods_without_a_server_model() -> None:
    shared = result("fedavg", {"a": 0.5})
    other = copy.deepcopy(shared)
    other["clients"]["a"]["balanced_accuracy"] = [0.7]
    shared["global"] = {"clients": other["clients"], "summary": other["summary"]}
    table = results_table([shared, result("isolated", {"a": 0.6}, method="isolated")], model="global")
    assert [row.label for row in table.rows] == ["fedavg"]
    assert table.rows[0].cells[0].text == "70.0"


def test_other_federations_do_not_share_a_table() -> None:
    with pytest.raises(InputError, match="'y' has clients"):
        results_table([result("x", {"a": 0.5}), result("y", {"c": 0.5})])


def test_terminal_table_has_bold_italic_and_every_row() -> None:
    from rich.console import Console

    table = paper_table()
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=True, color_system="standard").print(to_rich(table))
    lines = {row.label: next(li for li in out.getvalue().splitlines() if row.label in li) for row in table.rows}
    assert "\x1b[1m70.0" in lines["fedavg"]
    assert "\x1b[3m60.0" in lines["fedavg"]
    assert "\x1b[1m" not in lines["isolated"]
