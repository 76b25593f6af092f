"""Studies: what is declared becomes comparisons, and their table says what the results say."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from command_fixtures import refused, rows, wardround
from experiment_fixtures import TINY, tiny, tiny_file
from wardround import studying
from wardround.config import experiment_from
from wardround.errors import InputError, RunError
from wardround.report.study_figures import quality, resources
from wardround.report.study_page import study_markdown, study_tables
from wardround.studies import STUDIES
from wardround.study import Axis, Study, clients_axis
from wardround.studying import check_held_out, plan_study, run_study

TOY = Study(
    name="toy",
    title="A toy",
    question="Does it run?",
    source="nobody",
    method="fedavg",
    systems={"whole": {}, "half": {"transport.codec": "float16", "model.head": "shared"}},
    reference="whole",
    uncoded="whole",
)


class Notes:
    """What a watcher was told."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.begun: list[str] = []

    def queued(self, label: str, seed: int, rounds: int, done: bool) -> None:
        """Note the runs."""
        (self.kept if done else self.begun).append(f"{label} {seed}")

    def advanced(self, label: str, seed: int, round: int) -> None:
        """Nothing."""

    def ended(self, label: str, seed: int, error: str | None) -> None:
        """Nothing may fail here."""
        assert error is None


# ---- declarations


def test_the_ablation_switches_what_the_paper_switches() -> None:
    base = tiny(method__name="fedmedclip", method__lr_mlp=0.5, model__finetune_blocks=0)
    (leg,) = plan_study(STUDIES["fedmedclip-ablation"], base, Path("out"))
    found = {system.label: system.experiment.bound_method() for system in leg.systems}
    switches = {
        label: (m.contrastive != "none", m.private_mlp, m.agreement != "none", m.aggregate)  # type: ignore[attr-defined]
        for label, m in found.items()
    }
    assert switches == {
        "contr": (True, False, True, True),  # without the classifier there is nothing to agree with
        "contr + MLP": (True, True, False, True),
        "MLP not shared": (False, True, False, False),
        "all not shared": (True, True, True, False),
        "all but contr": (False, True, True, True),
        "all": (True, True, True, True),
    }
    assert {m.lr_mlp for m in found.values()} == {0.5}  # type: ignore[attr-defined]
    assert leg.folder == Path("out")


def test_a_study_brings_its_method_and_the_experiments_keys_for_it() -> None:
    base = experiment_from(TINY | {"methods": {"fedmedclip": {"hidden": 7}}}, "base")
    (leg,) = plan_study(STUDIES["fedmedclip-ablation"], base, Path())
    assert {(s.experiment.method["name"], s.experiment.method["hidden"]) for s in leg.systems} == {("fedmedclip", 7)}


def test_coding_has_the_experiments_method_and_every_codec() -> None:
    (leg,) = plan_study(STUDIES["coding"], tiny(method__name="pafp", method__m_loc=0.25), Path())
    assert {system.experiment.transport.codec for system in leg.systems} == {
        "float32", "float16", "float16+zlib", "float16+shuffle+zlib",
    }  # fmt: skip
    assert {(s.experiment.method["name"], s.experiment.method["m_loc"]) for s in leg.systems} == {("pafp", 0.25)}


def test_axes_are_combined_into_parts() -> None:
    parts = STUDIES["scalability"].with_clients([5, 10]).parts
    assert [(part.label, part.folder_name) for part in parts] == [
        ("5 clients / IID", "5-clients-IID"),
        ("5 clients / Dirichlet 0.5", "5-clients-Dirichlet-0.5"),
        ("10 clients / IID", "10-clients-IID"),
        ("10 clients / Dirichlet 0.5", "10-clients-Dirichlet-0.5"),
    ]
    assert parts[3].changes == {
        "data.partition.clients": 10, "data.partition.kind": "dirichlet", "data.partition.alpha": 0.5,
    }  # fmt: skip
    assert len(STUDIES["scalability"].parts) == 6


def test_methods_go_with_studies_that_have_none() -> None:
    toy = Study("toy", "", "", "", axes=(Axis("rounds", {"one": {"rounds": 1}, "two": {"rounds": 2}}),))
    base = experiment_from(TINY | {"variants": {"slow": {"training": {"lr": 0.001}}}}, "base")
    one, two = plan_study(toy, base, Path("out"), ["slow", "pafp:m_loc=0.5"])
    assert [system.label for system in one.systems] == ["slow", "pafp:m_loc=0.5"]
    assert [system.experiment.rounds for system in (*one.systems, *two.systems)] == [1, 1, 2, 2]
    assert one.systems[0].experiment.training.lr == 0.001
    assert two.systems[1].experiment.method["m_loc"] == 0.5
    assert [system.label for system in plan_study(toy, base, Path())[0].systems] == ["fedavg"]
    with pytest.raises(InputError, match="--methods: the study coding has systems of its own: float32, float16"):
        plan_study(STUDIES["coding"], base, Path(), ["pafp"])


def test_systems_that_the_experiment_makes_the_same_are_refused() -> None:
    base = tiny(method__name="fedmedclip", method__agreement="none", model__finetune_blocks=0)
    with pytest.raises(InputError, match=r"'contr \+ MLP' and 'all' are the same system here; leave method.agreement"):
        plan_study(STUDIES["fedmedclip-ablation"], base, Path())


def test_keys_that_do_not_fit_name_study_and_part() -> None:
    data = {"source": "folders", "path": ".", "partition": {"kind": "column", "column": "ward"}}
    by_column = experiment_from(TINY | {"data": data}, "base")
    with pytest.raises(InputError, match=r"study scalability, 5 clients / IID: .*partition\.column goes with"):
        plan_study(STUDIES["scalability"], by_column, Path())


# ---- a study of one part


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two systems, two seeds, one round."""
    out = tmp_path_factory.mktemp("toy")
    base = tiny(rounds=1, training__lr=0.1)
    run_study(TOY, plan_study(TOY, base, out), (3, 4), out, Notes(), 2, "wardround study toy tiny.toml")
    return out


def test_figures_are_those_of_the_results(toy: Path) -> None:
    record = json.loads((toy / "study.json").read_text())
    (part,) = record["parts"]
    assert [system["label"] for system in part["systems"]] == ["whole", "half"]
    table = rows((toy / "study.md").read_text(), "A toy. In percent")
    for system in part["systems"]:
        runs = [json.loads((toy / system["label"] / f"seed-{seed}" / "results.json").read_text()) for seed in (3, 4)]
        for name in ("accuracy", "balanced_accuracy", "auroc"):
            each = [np.mean([client[name][0] for client in run["clients"].values()]) for run in runs]
            assert system["figures"][name]["mean"] == pytest.approx(np.mean(each))
            assert system["figures"][name]["std"] == pytest.approx(np.std(each, ddof=1))
        pooled = [run["summary"]["pooled_balanced_accuracy"]["mean"] for run in runs]
        assert system["figures"]["pooled_balanced_accuracy"]["mean"] == pytest.approx(np.mean(pooled))
        shown = f"{100 * system['figures']['auroc']['mean']:.1f} ± {100 * system['figures']['auroc']['std']:.1f}"
        assert table[system["label"]]["macro AUROC"] == shown
        assert "Global" not in table[system["label"]]
    means = {s["label"]: s["figures"]["balanced_accuracy"]["mean"] for s in part["systems"]}
    assert part["systems"][0]["difference"] is None
    assert part["systems"][1]["difference"]["difference"] == pytest.approx(means["half"] - means["whole"])
    assert table["whole"]["− whole"] == "–"
    assert re.fullmatch(r"[−+.\d]+ \[[−+.\d]+, [−+.\d]+\]", table["half"]["− whole"])


def test_resources_are_counted_a_client_and_round(toy: Path) -> None:
    whole, half = json.loads((toy / "study.json").read_text())["parts"][0]["systems"]
    messages = [json.loads(line) for line in (toy / "half" / "seed-3" / "messages.jsonl").read_text().splitlines()]
    ups = {line["bytes"] for line in messages if line["direction"] == "up"}
    assert half["resources"]["up_each"] == pytest.approx(np.mean(list(ups)), rel=1e-3)
    assert 0.45 < half["resources"]["up_each"] / whole["resources"]["up_each"] < 0.55
    ours, theirs = whole["resources"]["parameters"], half["resources"]["parameters"]
    head = 64 * 3 + 3  # local in one system, shared in the other
    assert (ours["local"], theirs["local"]) == (head, 0)
    assert theirs["shared"] - ours["shared"] == head
    assert ours["frozen"] == theirs["frozen"] > 0
    table = rows((toy / "study.md").read_text(), "What it takes.")
    assert table["half"]["trainable"] == table["whole"]["trainable"] == f"{ours['shared'] + ours['local']:,}"
    assert table["half"]["numbers up, a client and round"] == f"{theirs['shared']:,}"
    assert (table["half"]["rounds"], table["half"]["local epochs"]) == ("1", "1")
    assert "÷ fedavg" not in table["half"]  # of nothing else
    assert table["half"]["up, uncoded"] == table["whole"]["up, a client and round"]
    assert table["half"]["up, uncoded"] != table["half"]["up, a client and round"]


def test_a_page_stands_alone_and_leads_to_the_report(toy: Path) -> None:
    page = (toy / "study.md").read_text()
    assert page.startswith("# A toy\n\nDoes it run? After: nobody.\n\n    wardround study toy tiny.toml\n")
    assert "](report.html)" in page
    assert (toy / "report.html").exists()
    assert "half" in page[page.index("## Is it more than noise?") :]


def test_the_ordinary_page_counts_parameters_too(toy: Path, tmp_path: Path) -> None:
    assert wardround("report", toy, "--markdown", tmp_path / "page.md").exit_code == 0
    table = rows((tmp_path / "page.md").read_text(), "| method | trainable |")
    assert table["whole"]["local"] == "195"
    assert "trainable" in (toy / "report.html").read_text()


def test_what_is_finished_is_kept(toy: Path) -> None:
    notes, before = Notes(), (toy / "study.md").read_text()
    legs = plan_study(TOY, tiny(rounds=1, training__lr=0.1), toy)
    run_study(TOY, legs, (3, 4), toy, notes, 2, "wardround study toy tiny.toml")
    assert (len(notes.kept), notes.begun) == (4, [])
    assert (toy / "study.md").read_text() == before


def test_a_folder_belongs_to_one_study(toy: Path, tmp_path: Path) -> None:
    coding = STUDIES["coding"]
    with pytest.raises(InputError, match="holds the study toy, not coding; give another --out"):
        run_study(coding, plan_study(coding, tiny(), toy), (3,), toy, Notes())
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(InputError, match="holds runs that are no study"):
        run_study(coding, plan_study(coding, tiny(), tmp_path), (3,), tmp_path, Notes())


def test_held_out_scores_are_a_column_where_there_are_any(toy: Path) -> None:
    record = json.loads((toy / "study.json").read_text())
    more = copy.deepcopy(record)
    more["parts"][0]["systems"][0]["figures"]["held_out"] = {"mean": 0.625, "std": 0.0}
    table = rows(study_markdown(more), "A toy. In percent")
    assert (table["whole"]["Global"], table["half"]["Global"]) == ("62.5 ± 0.0", "–")
    assert "Global" not in study_markdown(record)


def test_results_of_older_versions_fit() -> None:
    client = {"n_train": 30, "accuracy": [0.5, 1.0], "balanced_accuracy": [0.5, 1.0], "auroc": [None, 0.75]}
    other = {"n_train": 10, "accuracy": [0.9, 0.2], "balanced_accuracy": [0.5, 1.0], "auroc": [None, 0.25]}
    results = {
        "clients": {"a": client, "b": other},
        "summary": {"pooled_balanced_accuracy": {"mean": 0.5, "std": 0.1}},
        "communication": {"bytes_up": 100, "bytes_down": 50},
        "seconds": {"train": 3.0},
    }
    found = quality(results)
    assert found["accuracy"] == pytest.approx({"mean": 0.65, "std": 0.005**0.5})  # 0.7 and 0.6
    assert found["weighted_accuracy"] == pytest.approx({"mean": 0.7, "std": 0.02**0.5})  # 0.6 and 0.8
    assert found["weighted_balanced_accuracy"] == pytest.approx({"mean": 0.75, "std": 0.125**0.5})
    assert found["auroc"] == {"mean": 0.5, "std": 0.0}
    assert "held_out" not in found
    assert resources(results, 4.0) == {
        "seconds": None, "bytes_up": 100, "bytes_down": 50, "up_each": 25.0, "down_each": 12.5, "parameters": None,
        "numbers_up": None,
    }  # fmt: skip
    assert resources(results, 0.0)["up_each"] is None
    assert study_tables({"parts": []}) == []


# ---- a study of several parts


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment on pictures of two sites, one of which never trains."""
    root = tmp_path_factory.mktemp("pictures")
    stream = np.random.default_rng(0)
    for site, count in (("north", 24), ("south", 6)):
        for name, level in (("dark", 90), ("light", 150)):
            folder = root / "images" / site / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.clip(level + 40 * stream.standard_normal((32, 32, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    data = {"source": "folders", "path": str(root / "images"), "image_size": 32, "held_out": ["south"]}
    changes = {"data": data, "rounds": 1, "model": TINY["model"] | {"head": "shared"}}
    experiment_from(TINY | changes, "pictures").write(root / "pictures.toml")
    return root


def test_more_clients_are_a_table_over_parts(pictures: Path) -> None:
    out = pictures / "study"
    typed = ("study", "scalability", pictures / "pictures.toml", "--clients", "2", "--out", out, "--workers", 1)
    result = wardround(*typed)
    assert result.exit_code == 0, result.output
    page = (out / "study.md").read_text()
    table = rows(page, "More clients with fewer images each. In percent")
    assert list(table) == ["2 clients / IID", "2 clients / Dirichlet 0.5"]
    for label, folder in (
        ("2 clients / IID", "2-clients-IID"),
        ("2 clients / Dirichlet 0.5", "2-clients-Dirichlet-0.5"),
    ):
        results = json.loads((out / folder / "fedavg" / "results.json").read_text())
        assert list(results["held_out"]) == ["south"]
        assert table[label]["Global"] == f"{100 * results['held_out']['south']['balanced_accuracy'][0]:.1f}"
        assert f"]({folder}/report.html)" in page
        assert (out / folder / "report.html").exists()
    roster = json.loads((out / "2-clients-IID" / "federation.json").read_text())
    one, two = (np.array(client["counts"]["train"]) for client in roster["clients"])
    assert np.abs(one - two).max() <= 1
    again = wardround(*typed, "--json")
    assert json.loads(again.stdout)["study"] == "scalability"
    assert again.stderr.count("finished before, kept") == 2


def test_one_failing_part_does_not_stop_the_others(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def fail_first(systems: Sequence[Any], seeds: Any, out: Path, *rest: Any, **more: Any) -> None:
        ran.append(out.name)
        if len(ran) == 1:
            raise RunError("the disk is full")

    monkeypatch.setattr(studying, "compare", fail_first)
    study = Study("two", "Two", "?", "!", axes=(Axis("rounds", {"one": {"rounds": 1}, "two": {"rounds": 2}}),))
    with pytest.raises(RunError, match="one: the disk is full"):
        run_study(study, plan_study(study, tiny(), tmp_path), (3,), tmp_path, Notes())
    assert ran == ["one", "two"]
    assert "Nothing has finished yet." in (tmp_path / "study.md").read_text()


def test_a_part_that_cannot_be_shows_before_anything_runs(pictures: Path, tmp_path: Path) -> None:
    study = STUDIES["scalability"]
    base = experiment_from(TINY | {"data": {"source": "folders", "path": str(pictures / "images")}}, "base")
    many = Study("many", "", "", "", axes=(clients_axis([2, 60]), *study.axes[1:]))
    with pytest.raises(InputError, match="smallest client had at most 0 training"):
        run_study(many, plan_study(many, base, tmp_path), (3,), tmp_path, Notes())
    assert [path.name for path in tmp_path.iterdir()] == ["study.json"]


def test_a_study_asks_for_images_that_never_train(pictures: Path) -> None:
    bare = experiment_from(TINY | {"data": {"source": "folders", "path": str(pictures / "images")}}, "base")
    share = bare.changed({"data.held_out_share": 0.2}, "base")
    check_held_out(STUDIES["scalability"], share)
    check_held_out(STUDIES["coding"], bare)
    with pytest.raises(InputError, match=r"data\.held_out, or set data\.held_out_share; --without-held-out"):
        check_held_out(STUDIES["scalability"], bare)


# ---- the command line


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    file, out = tiny_file(tmp_path, rounds=1), tmp_path / "out"
    assert "there is no study 'codin' (did you mean 'coding'?)" in refused("study", "codin", file, "--out", out)
    assert "does not vary the number of clients" in refused("study", "coding", file, "--clients", 3, "--out", out)
    for wrong in ("5,x", "0", ","):
        said = refused("study", "scalability", file, "--clients", wrong, "--out", out)
        assert "--clients: expected whole numbers from 1 up, as 5,10,15" in said
    assert "wants images that never train" in refused("study", "scalability", file, "--out", out)
    said = refused("study", "scalability", file, "--out", out, "--clients", 60, "--without-held-out")
    assert "smallest client had at most 0 training" in said


def test_studies_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    listed = wardround("studies").output
    assert max(map(len, listed.splitlines())) <= 80
    found = {entry["name"]: entry for entry in json.loads(wardround("studies", "--json").stdout)}
    assert found.keys() == STUDIES.keys()
    assert all(name in listed for name in found)
    assert found["fedmedclip-ablation"]["method"] == "fedmedclip"
