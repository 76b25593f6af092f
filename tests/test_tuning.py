"""A search gives every method the same budget, chooses on validation images alone, and hands its best to `compare`."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from typer.testing import CliRunner

from experiment_fixtures import CLIENTS, TINY, tiny
from wardround import run_queue
from wardround.cli import app
from wardround.config import Experiment, differences, experiment_from, load_experiment
from wardround.errors import InputError, RunError
from wardround.search_plan import Search, plan
from wardround.search_space import SearchSpace, search_space
from wardround.seeds import numpy_stream
from wardround.systems import systems_named
from wardround.tuning import tune, validation_scores

LR = {"training": {"lr": [0.01, 0.03, 0.1]}}
MU = {"fedprox": {"mu": [0.0, 0.1]}}


def base(tune: dict[str, Any], **sections: Any) -> Experiment:
    """The tiny experiment with two rounds and a section `[tune]`."""
    return experiment_from(TINY | {"rounds": 2, "tune": tune} | sections, "base")


class Silence:
    """A watcher that counts what was kept and what was run."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, int]] = []
        self.ran: list[tuple[str, int]] = []

    def queued(self, label: str, seed: int, rounds: int, done: bool) -> None:
        """Note the runs that were finished before."""
        self.kept += [(label, seed)] if done else []

    def advanced(self, label: str, seed: int, round: int) -> None:
        """Nothing."""

    def ended(self, label: str, seed: int, error: str | None) -> None:
        """Note an end."""
        self.ran.append((label, seed))


# ---- the space of combinations


def test_a_grid_is_the_product_of_the_lists() -> None:
    lists: dict[str, list[Any]] = {"training.lr": [1, 2, 3], "training.loss": ["a", "b"], "method.mu": [0.5, 0.25]}
    space = SearchSpace(lists)
    assert space.grid() == [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    assert [list(one) for one in space.grid()] == [list(lists)] * 12
    assert (SearchSpace({}).size, SearchSpace({}).grid()) == (1, [{}])


def test_a_sample_is_seeded_and_never_repeats() -> None:
    space = SearchSpace({"training.lr": [1, 2, 3, 4], "method.mu": [5, 6, 7]})
    draws = [space.sample(5, numpy_stream(seed, "tuning")) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert all(len({tuple(one.values()) for one in drawn}) == 5 for drawn in draws)
    every = space.sample(99, numpy_stream(0, "tuning"))
    assert sorted(map(str, every)) == sorted(map(str, space.grid()))
    assert every[:5] == draws[0], "a larger budget adds to a smaller one"


def test_a_sample_is_even() -> None:
    space = SearchSpace({"training.lr": [1, 2], "method.mu": [5, 6]})
    stream = np.random.default_rng(0)
    counts = Counter(str(one) for _ in range(1000) for one in space.sample(2, stream))
    assert len(counts) == 4
    assert all(abs(count - 500) < 80 for count in counts.values()), "five standard deviations of 16"


def test_a_method_takes_the_lists_for_all_and_its_own() -> None:
    listed = {
        "training.lr": [0.1, 0.2],
        "model": {"head": ["local", "shared"]},
        "fedprox": {"mu": [0.1], "training.lr": [0.3]},
        "near": {"mu": [7.0]},
    }
    variants = {"near": {"method": {"name": "fedprox", "mu": 1.0}}, "fixed": {"method": {"name": "fedprox", "mu": 1.0}}}
    experiment = base(listed, variants=variants)

    def of(label: str, method: str, *fixed: str) -> dict[str, Any]:
        return dict(search_space(experiment, label, method, fixed).values)

    heads = {"model.head": ["local", "shared"]}
    assert of("fedavg", "fedavg", "method.name") == {"training.lr": [0.1, 0.2], **heads}
    assert of("fedprox", "fedprox", "method.name") == {"training.lr": [0.3], **heads, "method.mu": [0.1]}
    assert of("fixed", "fedprox", "method.name", "method.mu") == {"training.lr": [0.3], **heads}
    assert of("near", "fedprox", "method.name", "method.mu") == {"training.lr": [0.3], **heads, "method.mu": [7.0]}


def test_ccvr_on_top_of_a_method_has_its_own_lists() -> None:
    budget, (found,) = plan(base({"fedprox+ccvr": {"mu": [0.1, 0.2]}}), ["FedProx+CCVR"], Search())
    assert (budget, found.label, found.space.values) == (2, "fedprox+ccvr", {"method.mu": [0.1, 0.2]})


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({}, "[tune] is empty: say which values to try"),
        ({"training": {"lrr": [1.0]}}, "[tune] fedprox: training.lrr: there is no such key (did you mean 'lr'?)"),
        ({"lr": [0.1]}, "[tune] fedprox: lr: there is no such key (did you mean 'training.lr'?)"),
        ({"fedprox": {"muu": [1.0]}}, "[tune] fedprox: method.muu: there is no such key (did you mean 'mu'?)"),
        ({"fedprox": {"mu": [-1.0]}}, "[tune] fedprox: method.mu: expected a number from 0 up, found -1"),
        ({"fedprx": {"mu": [1.0]}}, "[tune.fedprx]: there is no method, variant or section 'fedprx' (did you mean"),
        ({"fedprox": [1.0]}, "tune.fedprox: expected a section [tune.fedprox] of lists, found [1.0]"),
        ({"training": {"lr": 0.1}}, "[tune] training.lr: expected a list of values, as [tune.training] lr = "),
        ({"training": {"lr": []}}, "[tune] training.lr: expected a list of values"),
        ({"training": {"lr": [1, 2, 1.0]}}, "[tune] training.lr: 1.0 stands twice in the list"),
        ({"rounds": [1, 2]}, "[tune] rounds: cannot be searched; "),
        ({"data.augment": ["none", "light"]}, "[tune] data.augment: cannot be searched; "),
        ({"federation": {"participation": [0.5, 1.0]}}, "[tune] federation.participation: cannot be searched; "),
        ({"training.local_epochs": [1, 2]}, "[tune] training.local_epochs: cannot be searched; "),
        ({"fedprox": {"name": ["pafp"]}}, "[tune] method.name: cannot be searched; "),
    ],
)
def test_a_wrong_section_is_explained(listed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(base(listed), ["fedprox"], Search())
    assert str(caught.value).startswith(message)


# ---- the plan


def test_every_method_has_the_same_number_of_trials() -> None:
    experiment = base({**LR, **MU, "pafp": {"lambda": [0.1, 1.0, 10.0], "m_loc": [0.5, 1.0]}})
    budget, drawn = plan(experiment, ["fedprox", "pafp"], Search("random", budget=5))
    assert (budget, [len(each.trials) for each in drawn]) == (5, [5, 5])
    for each in drawn:
        assert len({trial.system.folder_name for trial in each.trials}) == 5
    again = plan(experiment, ["pafp", "fedprox"], Search("random", budget=5))[1]
    assert again[::-1] == drawn, "a method's draw depends on nobody else"


def test_a_grid_has_the_budget_of_the_largest_and_fewer_trials_where_there_are_no_more() -> None:
    budget, found = plan(base({**LR, **MU}), ["fedavg", "fedprox", "ft-2B"], Search(rounds=1))
    assert (budget, [len(each.trials) for each in found]) == (6, [3, 6, 3])
    assert [each.label for each in found] == ["fedavg", "fedprox", "ft-2b"]
    third = found[1].trials[3]
    assert (third.values, third.system.label) == ({"training.lr": 0.03, "method.mu": 0.1}, "fedprox lr=0.03 mu=0.1")
    experiment = third.system.experiment
    assert (experiment.training.lr, experiment.method) == (0.03, {"name": "fedprox", "mu": 0.1})
    assert (experiment.rounds, experiment.tune) == (1, {})
    assert found[2].trials[0].system.experiment.model.finetune_blocks == 2


def test_what_a_preset_sets_is_not_searched() -> None:
    found = plan(base({**LR, "model": {"finetune_blocks": [1, 2]}}), ["ft-2b", "fedavg"], Search())[1]
    assert [each.space.size for each in found] == [3, 6]


@pytest.mark.parametrize(
    ("names", "search", "message"),
    [
        (["fedavg", "fedprox"], Search(budget=5), "fedprox: its grid has 6 combinations, the budget is 5 trials; "),
        (["fedavg"], Search("random"), "--search random: needs --budget"),
        (["fedprx"], Search(), "--methods: there is no method or variant 'fedprx' (did you mean 'fedprox'?)"),
        (["fedprox:mu=1"], Search(), "--methods fedprox:mu=1: `tune` takes methods, presets and labels of [variants]"),
        (["fedavg", "FedAvg"], Search(), "--methods: fedavg and fedavg would share one name"),
        ([], Search(), "--methods: name at least one method"),
        (["fedavg", "longer"], Search(), "rounds differs between the methods (fedavg: 2, longer: 9), so their budgets"),
        (["fedavg", "twice"], Search(), "training.local_epochs differs between the methods (fedavg: 1, twice: 2)"),
        (["fedavg", "half"], Search(), "federation.participation differs between the methods (fedavg: 1.0, half: 0.5)"),
    ],
)
def test_a_plan_that_is_not_fair_or_not_possible_is_refused(names: list[str], search: Search, message: str) -> None:
    variants = {
        "longer": {"rounds": 9},
        "twice": {"training": {"local_epochs": 2}},
        "half": {"federation": {"participation": 0.5}},
    }
    with pytest.raises(InputError) as caught:
        plan(base({**LR, **MU}, variants=variants), names, search)
    assert str(caught.value).startswith(message)


def test_a_value_that_is_not_drawn_must_be_allowed_too() -> None:
    rates = [*(0.001 * n for n in range(1, 200)), -1.0]
    with pytest.raises(InputError, match=r"training\.lr: expected a number above 0, found -1"):
        plan(base({"training": {"lr": rates}}), ["fedavg"], Search("random", budget=1))


def test_trials_that_would_share_a_folder_are_refused() -> None:
    with pytest.raises(InputError, match="would share one folder"):
        plan(base({"model": {"pretrained": ["a/b", "a b"]}}), ["fedavg"], Search())


# ---- what a run says on validation images


def scores(balanced_accuracy: float | None) -> dict[str, Any]:
    """The part of a metrics line that one model has on one split."""
    return {"balanced_accuracy": balanced_accuracy, "confusion": [[1, 0], [0, 1]]}


def said(round: int, client: str, **models: tuple[float | None, float]) -> str:
    """A metrics line: for `personal` or `received`, the validation and the test score."""
    parts = {which: {"val": scores(val), "test": scores(test)} for which, (val, test) in models.items()}
    return json.dumps({"round": round, "client": client, **parts}) + "\n"


def test_the_score_is_the_mean_over_clients_of_their_last_own_models(tmp_path: Path) -> None:
    text = [
        said(1, "a", personal=(0.1, 0.9), received=(0.9, 0.9)),
        said(1, "b", personal=(0.6, 0.1)),
        said(1, "d", personal=(None, 0.4)),
        json.dumps({"round": 1, "server": {}}) + "\n",
        said(2, "a", personal=(0.8, 0.1)),
        json.dumps({"round": 2, "client": "b", "refused": "late"}) + "\n",
        said(2, "c", received=(0.2, 1.0)),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(text))
    results = {"clients": {name: {"n_train": n} for name, n in {"a": 10, "b": 30, "c": 60, "d": 900}.items()}}
    assert validation_scores(tmp_path, results) == {
        "unweighted": pytest.approx((0.8 + 0.6 + 0.2) / 3),
        "weighted": pytest.approx((10 * 0.8 + 30 * 0.6 + 60 * 0.2) / 100),
    }


# ---- the search, on runs that only pretend to train

Judge = Callable[[Experiment], tuple[float, float]]


def pretend(monkeypatch: pytest.MonkeyPatch, judge: Judge) -> None:
    """Let a run write what `judge` says: its balanced accuracy on validation and on test images."""

    def run(experiment: Experiment, folder: Path, **rest: Any) -> None:
        assert all(len(client.train) and not len(client.test) for client in rest["federation"].clients)
        val, test = judge(experiment)
        folder.mkdir(parents=True)
        experiment.write(folder / "config.toml")
        (folder / "checkpoints").mkdir()
        last = "".join(said(experiment.rounds, name, personal=(val, test)) for name in CLIENTS)
        (folder / "metrics.jsonl").write_text(said(0, CLIENTS[0], personal=(1 - val, test)) + last)
        results = {
            "rounds": experiment.rounds,
            "clients": {name: {"n_train": 12} for name in CLIENTS},
            "seconds": {"train": 2.0, "evaluate": 0.5, "total": 9.0},
        }
        (folder / "results.json").write_text(json.dumps(results))

    monkeypatch.setattr(run_queue, "run", run)


def middle_is_best(experiment: Experiment) -> tuple[float, float]:
    """Validation prefers the middle rate and a small mu, and differs between seeds; the test set says the opposite."""
    cost = 10 * abs(experiment.training.lr - 0.03) + experiment.method.get("mu", 0.0)
    val = 0.9 - cost / 4 + 0.02 * (experiment.seed - 3)
    return val, 1 - val


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Experiment, dict[str, Any]]:
    """A finished search of two methods over two seeds."""
    folder = tmp_path_factory.mktemp("tune") / "t"
    experiment = base({**LR, **MU}, methods={"fedprox": {"mu": 0.7}})
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, middle_is_best)
        record = tune(experiment, ["fedprox", "fedavg"], folder, Silence(), Search(seeds=2, rounds=1), workers=2)
    return folder, experiment, record


def test_the_best_is_chosen_on_validation_images(searched: tuple[Path, Experiment, dict[str, Any]]) -> None:
    folder, _, record = searched
    assert record == json.loads((folder / "tuning.json").read_text())
    best = record["methods"]["fedprox"]["best"]
    assert (best["label"], best["values"]) == ("fedprox lr=0.03 mu=0.0", {"training.lr": 0.03, "method.mu": 0.0})
    assert best["score"] == pytest.approx(0.91)
    assert best["std"] == pytest.approx(np.std([0.9, 0.92], ddof=1))
    assert record["methods"]["fedavg"]["best"]["values"] == {"training.lr": 0.03}


def test_all_trials_are_recorded_with_the_budget(searched: tuple[Path, Experiment, dict[str, Any]]) -> None:
    _, _, record = searched
    assert {key: record[key] for key in ("search", "budget", "rounds", "seeds", "criterion")} == {
        "search": "grid", "budget": 6, "rounds": 1, "seeds": [3, 4], "criterion": "unweighted",
    }  # fmt: skip
    assert record["images"]["site-02"] == {"train": 12, "val": 3}
    prox, avg = record["methods"]["fedprox"], record["methods"]["fedavg"]
    assert (len(prox["trials"]), len(avg["trials"]), avg["combinations"]) == (6, 3, 3)
    assert prox["searched"] == {"training.lr": [0.01, 0.03, 0.1], "method.mu": [0.0, 0.1]}
    assert avg["trials"][2]["scores"] == pytest.approx([0.9 - 0.7 / 4, 0.92 - 0.7 / 4])
    assert avg["trials"][2]["seconds"] == [2.5, 2.5]
    assert record["notes"] == ["fedavg has 3 combinations, fewer than the budget of 6 trials: all were tried"]


def test_finished_trials_keep_no_checkpoints(searched: tuple[Path, Experiment, dict[str, Any]]) -> None:
    assert len(list((searched[0] / "trials").glob("*/seed-*/results.json"))) == 18
    assert not list(searched[0].rglob("checkpoints"))


def test_compare_reads_the_best_values_from_the_tuned_file(searched: tuple[Path, Experiment, dict[str, Any]]) -> None:
    folder, experiment, _ = searched
    tuned = load_experiment(folder / "tuned.toml")
    assert (tuned.rounds, tuned.methods) == (experiment.rounds, experiment.methods)
    prox, avg, other = systems_named(tuned, ["fedprox", "fedavg", "fedprox:mu=1"])
    assert (prox.experiment.method["mu"], prox.experiment.training.lr) == (0.0, 0.03)
    assert (avg.experiment.method["name"], avg.experiment.training.lr) == ("fedavg", 0.03)
    assert (other.experiment.method["mu"], other.experiment.training.lr) == (1, 0.03)
    ran = load_experiment(folder / "trials" / "fedprox-lr=0.03-mu=0.0" / "seed-3" / "config.toml")
    assert ran.digest() == prox.experiment.digest(), "compare runs what the best trial ran"


def test_a_second_call_runs_nothing(
    searched: tuple[Path, Experiment, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, experiment, record = searched
    shutil.copytree(folder, tmp_path / "t")
    monkeypatch.setattr(run_queue, "run", None)
    watcher = Silence()
    again = tune(experiment, ["fedprox", "fedavg"], tmp_path / "t", watcher, Search(seeds=2, rounds=1))
    assert again == record
    assert (len(watcher.kept), watcher.ran) == (18, [])


def test_a_changed_experiment_is_refused(searched: tuple[Path, Experiment, dict[str, Any]]) -> None:
    folder, experiment, _ = searched
    other = experiment.model_copy(update={"training": experiment.training.model_copy(update={"momentum": 0.5})})
    with pytest.raises(InputError, match=r"^fedavg lr=0\.01: .*another experiment: training\.momentum: 0\.0 -> 0\.5"):
        tune(other, ["fedavg"], folder, Silence(), Search(rounds=1))


def test_of_equal_scores_the_first_in_the_file_is_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda _: (0.5, 0.5))
    record = tune(base({"training": {"lr": [0.1, 0.01]}}), ["fedavg"], tmp_path / "t", Silence(), Search())
    assert record["methods"]["fedavg"]["best"]["label"] == "fedavg lr=0.1"


def test_a_failed_trial_is_no_choice_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverging(experiment: Experiment) -> tuple[float, float]:
        if experiment.training.lr == 0.1:
            raise RunError("training went wrong")
        return experiment.training.lr, 0.0

    pretend(monkeypatch, diverging)
    experiment, folder = base(LR), tmp_path / "t"
    record = tune(experiment, ["fedavg"], folder, Silence(), Search())
    method = record["methods"]["fedavg"]
    assert (method["best"]["label"], method["trials"][2]["score"]) == ("fedavg lr=0.03", None)
    assert method["trials"][2]["failures"] == ["fedavg lr=0.1, seed 3: training went wrong"]
    assert "failed: fedavg lr=0.1, seed 3: training went wrong" in record["notes"]

    pretend(monkeypatch, lambda experiment: (experiment.training.lr, 0.0))
    watcher = Silence()
    record = tune(experiment, ["fedavg"], folder, watcher, Search())
    assert watcher.ran == [("fedavg lr=0.1", 3)]
    assert record["methods"]["fedavg"]["best"]["label"] == "fedavg lr=0.1"
    assert record["notes"] == ["fedavg: the best training.lr, 0.1, is the largest tried; a better one may lie beyond"]
    assert (folder / "tuned.toml").exists()


def test_a_method_without_a_finished_trial_leaves_no_tuned_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(experiment: Experiment) -> tuple[float, float]:
        if experiment.method["name"] == "isolated":
            raise RunError("lost")
        return 0.5, 0.5

    (tmp_path / "tuned.toml").write_text("rounds = 1")
    pretend(monkeypatch, failing)
    with pytest.raises(RunError, match=r"^no trial of isolated is finished: isolated lr=0\.1, seed 3: lost$"):
        tune(base({"training": {"lr": [0.1]}}), ["fedavg", "isolated"], tmp_path, Silence(), Search())
    assert not (tmp_path / "tuned.toml").exists()
    assert json.loads((tmp_path / "tuning.json").read_text())["methods"]["isolated"]["best"] is None


def test_without_validation_images_nothing_is_searched(tmp_path: Path) -> None:
    phantoms = {**TINY["data"]["phantoms"], "val_per_client": 0}
    experiment = base(LR, data={**TINY["data"], "phantoms": phantoms})
    with pytest.raises(InputError) as caught:
        tune(experiment, ["fedavg"], tmp_path / "t", Silence(), Search())
    assert "no client has a validation image" in str(caught.value)
    assert "data.val_fraction = 0.1" in str(caught.value)
    assert not (tmp_path / "t").exists()


def test_methods_on_other_images_are_refused(tmp_path: Path) -> None:
    experiment = base(LR, variants={"fewer": {"data": {"max_train_per_client": 6}}})
    with pytest.raises(InputError, match=r"^fewer lr=0\.01: its training or validation images are not those of fedavg"):
        tune(experiment, ["fedavg", "fewer"], tmp_path / "t", Silence(), Search())


def test_a_single_runs_folder_is_no_place_for_a_search(searched: tuple[Path, Experiment, dict[str, Any]]) -> None:
    inside = searched[0] / "trials" / "fedavg-lr=0.1" / "seed-3"
    with pytest.raises(InputError, match="holds a single run, not a search"):
        tune(searched[1], ["fedavg"], inside, Silence(), Search())


# ---- the section in the file, and the command


def test_the_section_decides_no_numbers() -> None:
    assert base(LR).digest() == base(MU).digest() == tiny(rounds=2).digest()
    assert differences(base(LR), base(MU)) == []


def test_the_command_searches_and_prints_the_best(tmp_path: Path) -> None:
    file, out = tmp_path / "tiny.toml", tmp_path / "out"
    file.write_text(tomli_w.dumps(TINY | {"tune": {"fedprox": {"mu": [0.0, 1.0]}}}))
    options = ["--methods", "fedprox", "--rounds", "1", "--set", "tune.training.lr=[0.05]", "--out", str(out)]
    result = CliRunner().invoke(app, ["tune", str(file), *options], env={"COLUMNS": "80"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert f"written: {out / 'tuned.toml'}; `wardround compare` it with --methods fedprox" in result.stdout
    assert "Best of at most 2 trials a method" in result.stdout
    record = json.loads((out / "tuning.json").read_text())
    best = record["methods"]["fedprox"]["best"]
    assert f"{100 * best['score']:.1f}" in result.stdout
    for trial in record["methods"]["fedprox"]["trials"]:
        folder = out / "trials" / trial["label"].replace(" ", "-") / "seed-3"
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        own = [line["personal"] for line in lines if line.get("personal")]
        assert [each["test"]["n"] for each in own] == [0, 0, 0], "no test image was there to be looked at"
        assert trial["score"] == pytest.approx(sum(each["val"]["balanced_accuracy"] for each in own) / 3)
        assert load_experiment(folder / "config.toml").training.lr == 0.05
    assert systems_named(load_experiment(out / "tuned.toml"), ["fedprox"])[0].experiment.training.lr == 0.05


def test_the_command_explains_wrong_input(tmp_path: Path) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(tomli_w.dumps(TINY))
    result = CliRunner().invoke(app, ["tune", str(file), "--methods", "fedavg"], catch_exceptions=False)
    assert result.exit_code == 2
    assert "[tune] is empty" in result.stderr
