"""Reading run and compare folders, whole and broken."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from report_fixtures import METHODS, Method, World, write_compare, write_run
from wardround.errors import InputError
from wardround.report import series
from wardround.report.reading import Refusal, load

SMALL = World(clients=("north", "south"), sizes=(200, 100), rounds=3)


def test_a_run(tmp_path: Path) -> None:
    record = load(write_run(tmp_path / "run", SMALL, METHODS[1], seed=7))
    (system,) = record.systems
    (run,) = system.runs
    assert (record.kind, system.label, system.method, run.seed) == ("run", "ft-2B", "fedavg", 7)
    assert (run.rounds_done, run.rounds_planned) == (3, 3)
    assert record.clients == ("north", "south")
    assert record.roster is not None
    assert record.roster.counts["train"].sum(1).tolist() == SMALL.counts("train").sum(1).tolist()


def test_received_models_count_for_the_round_that_made_them(tmp_path: Path) -> None:
    (system,) = load(write_run(tmp_path / "run", SMALL, METHODS[1])).systems
    assert [round for round, name, _ in system.runs[0].scores("received", "test") if name == "north"] == [1, 2, 3]
    assert [round for round, name, _ in system.runs[0].scores("personal", "val") if name == "north"] == [1, 2, 3]


def test_a_comparison_keeps_the_order_of_its_methods(tmp_path: Path) -> None:
    methods = (METHODS[3], METHODS[0])
    record = load(write_compare(tmp_path, SMALL, methods, seeds=(2, 10)))
    assert record.kind == "compare"
    assert [system.label for system in record.systems] == ["pafp-alt T=2", "isolated"]
    assert [run.seed for run in record.systems[0].runs] == [2, 10]
    assert record.systems[0].results is not None
    assert record.systems[0].results["seeds"] == [2, 10]


def test_results_are_merged_anew_where_the_comparison_did_not_get_that_far(tmp_path: Path) -> None:
    write_compare(tmp_path, SMALL, METHODS[:1], seeds=(0, 1))
    (tmp_path / "isolated" / "results.json").unlink()
    (tmp_path / "comparison.json").unlink()
    (tmp_path / "federation.json").unlink()
    record = load(tmp_path)
    assert record.systems[0].results is not None
    assert record.systems[0].results["seeds"] == [0, 1]
    assert record.roster is not None


def test_refusals(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SMALL, refused=[(2, 1, "late"), (1, 0, "NaN")])
    run = load(folder).systems[0].runs[0]
    assert run.refusals() == [Refusal(0, 1, "north", "NaN"), Refusal(0, 2, "south", "late")]


@pytest.mark.parametrize("name", ["federation.json", "messages.jsonl", "config.toml", "results.json"])
def test_any_file_may_be_missing(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "run", SMALL)
    (folder / name).unlink()
    assert load(folder).clients == SMALL.clients


def test_a_line_that_a_killed_run_left_half_written_is_passed_over(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SMALL, METHODS[0], finished_rounds=2)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"round": 3, "client": "nor', encoding="utf-8")
    assert load(folder).systems[0].runs[0].rounds_done == 2


def test_a_round_done_again_replaces_the_first_try(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SMALL, METHODS[0], finished_rounds=2)
    again = {"round": 2, "client": "north", "train_loss": 0.125, "log": {}}
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(again) + "\n")
    run = load(folder).systems[0].runs[0]
    assert series.client_log(run, "train_loss", "north")[-1] == (2, 0.125)
    assert run.lines[2, "north"]["personal"]


def test_damage_within_a_file_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SMALL)
    lines = (folder / "metrics.jsonl").read_text().split("\n")
    lines[4] = lines[4][:20]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 5: not JSON"):
        load(folder)


def test_what_is_not_an_object_is_an_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SMALL)
    (folder / "results.json").write_text("[1]")
    with pytest.raises(InputError, match=r"results\.json: expected a JSON object, found list"):
        load(folder)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a run"):
        load(tmp_path)
    with pytest.raises(InputError, match="there is no such folder"):
        load(tmp_path / "absent")


def test_curves_are_means_over_seeds_with_their_spread() -> None:
    line = series.over_runs("x", [(1, 2.0), (2, 5.0), (1, 4.0), (2, float("nan"))])
    assert (line.x, line.y) == ([1, 2], [3.0, 5.0])
    assert line.spread == pytest.approx([2**0.5, 0.0])


def test_curves_over_local_epochs_count_passes(tmp_path: Path) -> None:
    """FM²'s fused rounds count twice; the mean is over clients, or at one of them."""
    folder = write_run(tmp_path / "run", SMALL, Method("fm2", "fm2", 0.7))
    (system,) = load(folder).systems
    at = {(round, client): scores["accuracy"] for round, client, scores in system.runs[0].scores("personal", "test")}
    line = series.convergence_curve(system, "accuracy", "fm2", look=9)
    assert (line.x, line.look, line.dash) == ([2, 4, 6], 9, 1)
    means = [100 * np.mean([at[round, client] for client in SMALL.clients]) for round in (1, 2, 3)]
    assert line.y == pytest.approx(means)
    one = series.convergence_curve(system, "accuracy", "fm2", client=SMALL.clients[1])
    assert one.y == pytest.approx([100 * at[round, SMALL.clients[1]] for round in (1, 2, 3)])


def test_logs_are_averaged_over_clients_and_bytes_over_seeds(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SMALL, METHODS[3])
    (system,) = load(folder).systems
    run = system.runs[0]
    each = [dict(series.client_log(run, "alignment_loss", name)) for name in SMALL.clients]
    mean = dict(series.client_log(run, "alignment_loss"))
    assert sorted(mean) == [2, 3]
    assert mean[3] == pytest.approx((each[0][3] + each[1][3]) / 2)
    names = ["alignment_loss", "alignment_gradient_ratio", "statistic_distance/0", "statistic_distance/1"]
    assert series.logged_names([system]) == names
    size = 4 * 125_600 + 310
    assert series.bytes_by_client(system) == dict.fromkeys(SMALL.clients, (3 * size, 3 * size))
    both = series.bytes_by_round(system, "both", ("up", "down"))
    assert both.y == pytest.approx([4 * size / 1e6] * 3)
