"""Sites that never train: what of the data they are, that nothing trains on them, and what judges them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from experiment_fixtures import tiny
from wardround.data.options import DataOptions
from wardround.data.read import place_records, read_federation
from wardround.errors import InputError
from wardround.evaluation.metrics import evaluate_probabilities, softmax
from wardround.evaluation.predictions import read_predictions
from wardround.evaluation.results import merge_results
from wardround.experiment import run, set_up
from wardround.federation.checkpoints import Checkpoints
from wardround.methods.base import FedAvg
from wardround.methods.registry import METHODS
from wardround.methods.trial import Network
from wardround.report import findings, sections
from wardround.report.markdown import render
from wardround.report.reading import load
from wardround.using import load_trained

ROWS = [(f"{site}{i}", "xy"[i % 2], site, f"p{site}{i // 2}") for site in "abc" for i in range(8)]


def table(folder: Path, rows: list[tuple[str, str, str, str]] | None = None) -> str:
    lines = ["image,label,site,patient_id"]
    for name, label, site, patient in rows or ROWS:
        Image.fromarray(np.full((8, 8, 3), 20 * (label == "y"), np.uint8)).save(folder / f"{name}.png")
        lines.append(f"{name}.png,{label},{site},{patient}")
    (folder / "metadata.csv").write_text("\n".join(lines))
    return str(folder)


def options(folder: Path, **more: object) -> DataOptions:
    return DataOptions(path=table(folder), image_size=8, **more)  # type: ignore[arg-type]


def test_all_images_of_a_held_out_site_are_for_testing(tmp_path: Path) -> None:
    federation = read_federation(options(tmp_path, held_out=("b",)), 0)
    assert federation.names == ("a", "c")
    (site,) = federation.held_out
    assert site.name == "b"
    assert (len(site.train), len(site.val), len(site.test)) == (0, 0, 8)
    assert sorted(site.test.names) == sorted(f"b{i}.png" for i in range(8))
    assert site.test.labels.tolist() == [0, 1] * 4


def test_the_others_are_split_as_if_the_site_did_not_exist(tmp_path: Path) -> None:
    """Neither order nor draws of the rest depend on it."""
    apart = read_federation(options(tmp_path, held_out=("b",)), 0)
    without = read_federation(options(tmp_path, sites=("a", "c")), 0)
    for ours, theirs in zip(apart.clients, without.clients, strict=True):
        assert ours.train.names == theirs.train.names
        assert ours.test.names == theirs.test.names


def test_a_share_is_the_same_for_every_number_of_clients_and_keeps_patients_whole(tmp_path: Path) -> None:
    found = []
    for clients in (2, 3):
        partition = {"kind": "dirichlet", "clients": clients, "alpha": 50.0}
        placement = place_records(options(tmp_path, held_out_share=0.25, partition=partition), 0)
        apart = [r for r, c in zip(placement.listing.records, placement.clients, strict=True) if c == "held-out"]
        rest = [r for r, c in zip(placement.listing.records, placement.clients, strict=True) if c != "held-out"]
        assert not {r.group for r in apart} & {r.group for r in rest}
        found.append(sorted(r.name for r in apart))
    assert found[0] == found[1]
    assert len(found[0]) == 6, "a quarter of 24"


def test_a_held_out_value_of_a_column(tmp_path: Path) -> None:
    partition = {"kind": "column", "column": "site"}
    federation = read_federation(options(tmp_path, held_out=("c",), partition=partition), 0)
    assert federation.names == ("a", "b")
    assert [site.name for site in federation.held_out] == ["c"]


def test_patients_on_both_sides_are_refused_and_named(tmp_path: Path) -> None:
    table(tmp_path, [*ROWS, ("extra", "x", "a", "pb1")])
    with pytest.raises(InputError, match="train elsewhere: pb1"):
        place_records(DataOptions(path=str(tmp_path), held_out=("b",)), 0)


def test_wrong_names_and_shares_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data.held_out: d not in .*allowed: a, b, c"):
        place_records(options(tmp_path, held_out=("d",)), 0)
    with pytest.raises(InputError, match="leaves no image"):
        place_records(options(tmp_path, held_out=("a", "b", "c")), 0)
    with pytest.raises(ValueError, match="give one of them"):
        options(tmp_path, held_out=("a",), held_out_share=0.1)
    with pytest.raises(ValueError, match="phantoms make their own"):
        DataOptions(source="phantoms", held_out_share=0.1)
    with pytest.raises(InputError, match="no phantom site site-09"):
        read_federation(DataOptions(source="phantoms", held_out=("site-09",)), 0)


def test_the_shared_model_is_judged_there(tmp_path: Path) -> None:
    """Its figures are those of the server's last model on these images, and the site is nowhere else."""
    experiment = tiny(model__head="shared", data__held_out=["site-03"], method__name="fedprox")
    results = run(experiment, tmp_path / "run")
    assert list(results["clients"]) == ["site-01", "site-02"]
    entry = results["held_out"]["site-03"]
    assert entry["n_test"] == 12 + 3 + 6
    roster = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert [site["name"] for site in roster["held_out"]] == ["site-03"]
    for file in ("metrics.jsonl", "messages.jsonl"):
        assert "site-03" not in (tmp_path / "run" / file).read_text()
    labels, logits = read_predictions(tmp_path / "run" / "held-out", "shared")["site-03"]
    assert entry["accuracy"][0] == pytest.approx(float((logits.argmax(1) == labels).mean()))
    trained = load_trained(tmp_path / "run", "site-01", "server")
    (site,) = read_federation(experiment.data, experiment.seed).held_out
    server = Checkpoints(tmp_path / "run" / "checkpoints", None).latest().server().state  # type: ignore[union-attr]
    state = trained.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in server.items()), "nothing of the client's is in it"
    by_hand = trained.logits(site.test.images)
    order = np.argsort(site.test.names, kind="stable")
    np.testing.assert_allclose(logits, by_hand[order], atol=2e-2)  # the cache is in half precision


def test_what_cannot_predict_alone_is_not_judged(tmp_path: Path) -> None:
    results = run(tiny(model__head="local", data__held_out=["site-03"], rounds=1), tmp_path / "run")
    assert results["held_out"] == {}
    assert run(tiny(rounds=1), tmp_path / "other")["held_out"] is None


def test_a_transductive_method_says_what_it_misses_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedAvg, "transductive", True)
    with pytest.raises(InputError, match=r"method.name = fedavg: .*data.held_out"):
        set_up(tiny())
    set_up(tiny(data__held_out=["site-03"]))


def test_a_small_held_out_site_stays_where_small_sites_go(tmp_path: Path) -> None:
    rows = [row for row in ROWS if row[2] != "b" or row[0] in ("b0", "b1")]
    table(tmp_path, rows)
    federation = read_federation(DataOptions(path=str(tmp_path), image_size=8, min_site_images=4, held_out=("b",)), 0)
    assert federation.names == ("a", "c")
    assert len(federation.held_out[0].test) == 2


def test_which_methods_predict_alone() -> None:
    shared = Network("wardround:resnet4-lib", 32, 1, head="shared")
    local = Network("wardround:resnet4-lib", 32, 1, head="local")
    assert FedAvg().predicts_alone(shared.model(FedAvg()))
    assert not FedAvg().predicts_alone(local.model(FedAvg()))
    isolated = METHODS["isolated"]()
    assert not isolated.predicts_alone(shared.model(isolated))
    medclip = METHODS["fedmedclip"]()
    encoder = Network("wardround:resnet4-lib", 32, 0, text=True)
    apart = medclip.model_copy(update={"aggregate": False})
    assert not apart.predicts_alone(encoder.model(apart))
    assert medclip.predicts_alone(encoder.model(medclip)), "its prompts predict, though its classifier is private"


def test_workers_and_resuming_judge_alike(tmp_path: Path) -> None:
    experiment = tiny(model__head="shared", data__held_out=["site-03"], rounds=2)
    one = run(experiment, tmp_path / "one", workers=1)
    two = run(experiment, tmp_path / "two", workers=2)
    assert one["held_out"] == two["held_out"]
    (tmp_path / "two" / "results.json").unlink()
    assert run(experiment, tmp_path / "two", resume=True)["held_out"] == one["held_out"]


def test_seeds_are_put_together_and_the_report_shows_them(tmp_path: Path) -> None:
    runs = []
    for seed in (1, 2):
        experiment = tiny(model__head="shared", data__held_out=["site-03"], rounds=1, seed=seed)
        runs.append(run(experiment, tmp_path / "all" / "fedavg" / f"seed-{seed}"))
    merged = merge_results(runs)
    assert merged["held_out"]["site-03"]["accuracy"] == [r["held_out"]["site-03"]["accuracy"][0] for r in runs]
    record = load(tmp_path / "all")
    grid = sections.held_out(record)
    assert grid is not None
    mean = 100 * float(np.mean(merged["held_out"]["site-03"]["accuracy"]))
    assert grid.rows[0][:4] == ("fedavg", "site-03", "21", f"{mean:.1f}")
    assert "## Sites that never trained" in render(record)


def test_the_overview_has_means_and_pooled_figures(tmp_path: Path) -> None:
    """Against the stored predictions, put together by hand."""
    results = run(tiny(rounds=1), tmp_path / "run")
    grid = sections.overview(load(tmp_path / "run"))
    assert grid is not None
    found = read_predictions(tmp_path / "run")
    labels, logits = (np.concatenate(parts) for parts in zip(*found.values(), strict=True))
    pooled = evaluate_probabilities(softmax(logits), labels)
    mean = np.mean([client["accuracy"][0] for client in results["clients"].values()])
    row = dict(zip(grid.headings, grid.rows[0], strict=True))
    assert row["accuracy, mean"] == f"{100 * mean:.1f}"
    assert row["accuracy, pooled"] == f"{100 * (pooled['accuracy'] or 0):.1f}"
    assert row["AUROC, pooled"] == f"{100 * (pooled['auroc'] or 0):.1f}"
    assert row["balanced accuracy, pooled"] == f"{100 * results['summary']['pooled_balanced_accuracy']['mean']:.1f}"


def test_seeds_that_some_methods_lack_are_in_no_table(tmp_path: Path) -> None:
    """A comparison that goes on shows the seeds that its summary is of, though runs of others lie there."""
    for seed in (1, 2):
        run(tiny(rounds=1, seed=seed), tmp_path / "fedavg" / f"seed-{seed}")
    first = json.loads((tmp_path / "fedavg" / "seed-1" / "results.json").read_text())
    (tmp_path / "fedavg" / "results.json").write_text(json.dumps(merge_results([first])))
    record = load(tmp_path)
    assert "with 1 seed each" in " ".join(findings.summary(record))
    grid = sections.overview(record)
    assert grid is not None
    pooled = first["summary"]["pooled_balanced_accuracy"]["mean"]
    assert dict(zip(grid.headings, grid.rows[0], strict=True))["balanced accuracy, pooled"] == f"{100 * pooled:.1f}"
