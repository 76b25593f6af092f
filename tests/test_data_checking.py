"""check_data reports everything that is wrong at once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wardround.data.checking import check_data
from wardround.data.findings import DataReport, Finding
from wardround.data.options import DataOptions

GOOD = [
    (f"{site}{label}{i}.png", label, site, split, "")
    for site in "ab"
    for label in "xy"
    for i, split in enumerate(["train"] * 3 + ["val"] * 2 + ["test"] * 5)
]


def make(folder: Path, rows: list[tuple[str, str, str, str, str]]) -> Path:
    rng = np.random.default_rng(0)
    for name, *_ in rows:
        if name and not (folder / name).exists():
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / name)
    lines = ["image,label,site,split,group", *(",".join(row) for row in rows)]
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    return folder


def kinds(report: DataReport) -> dict[str, Finding]:
    return {found.kind: found for found in report.findings}


def test_nothing_wrong(tmp_path):
    report = check_data(make(tmp_path, GOOD))
    assert report.findings == ()
    assert report.fit
    assert (report.images, report.sites, report.classes) == (40, ("a", "b"), ("x", "y"))
    assert report.render().endswith("fit for use: 0 errors, 0 warnings, 0 notes")


def test_everything_wrong_at_once(tmp_path):
    rows = [
        *GOOD,
        ("copy.png", "x", "b", "test", ""),
        ("label.png", "y", "a", "train", ""),
        ("gone.png", "x", "a", "train", ""),
        ("cut.png", "x", "a", "train", ""),
        ("blank.png", "", "a", "train", ""),
        ("nowhere.png", "x", "", "train", ""),
        ("lost.png", "z", "a", "test", ""),
        ("p1.png", "x", "a", "train", "patient 1"),
        ("p2.png", "x", "b", "test", "patient 1"),
        ("split.png", "x", "a", "holdout", ""),
        ("grey.png", "x", "a", "train", ""),
        ("small.png", "x", "a", "train", ""),
        ("", "x", "a", "train", ""),
    ]
    make(tmp_path, rows)
    (tmp_path / "copy.png").write_bytes((tmp_path / "ax0.png").read_bytes())
    Image.open(tmp_path / "ax1.png").save(tmp_path / "label.png", compress_level=0)
    (tmp_path / "gone.png").unlink()
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:200])
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(tmp_path / "grey.png")
    Image.fromarray(np.full((3, 16, 3), [1, 2, 3], np.uint8)).save(tmp_path / "small.png")
    report = check_data(tmp_path)
    found = kinds(report)
    expected = {
        "duplicate-across-splits": ("error", "copy.png"),
        "duplicate-labels": ("error", "label.png"),
        "missing-file": ("error", "gone.png"),
        "unreadable-image": ("error", "cut.png"),
        "empty-label": ("error", "blank.png"),
        "empty-site": ("error", "nowhere.png"),
        "empty-image": ("error", "row 54"),
        "label-not-trained": ("error", "lost.png"),
        "group-across-splits": ("error", "patient 1"),
        "group-across-sites": ("warning", "patient 1"),
        "unknown-split": ("error", "'holdout'"),
        "class-absent-from-site": ("warning", "z at b"),
        "class-absent-from-split": ("warning", "z in train"),
        "grey-and-colour": ("warning", "grey.png"),
        "odd-size": ("warning", "small.png"),
        "few-test-images": ("note", "z at a (1)"),
        "sizes": ("note", "16x16"),
    }
    assert set(found) == set(expected)
    for kind, (severity, example) in expected.items():
        assert found[kind].severity == severity, kind
        assert any(example in case for case in found[kind].examples), kind
    assert not report.fit
    order = [found.severity for found in report.findings]
    assert order == sorted(order, key=["error", "warning", "note"].index)


def test_the_report_as_json_and_text(tmp_path):
    make(tmp_path, [*GOOD, *((f"e{i}.png", "", "a", "train", "") for i in range(30))])
    report = check_data(tmp_path)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["fit"] is False
    (empty,) = [found for found in plain["findings"] if found["kind"] == "empty-label"]
    assert empty["count"] == 30
    assert len(empty["examples"]) == 10
    assert "and 25 more" in report.render()
    assert "not fit for use: 1 errors" in report.render()


def test_duplicates_are_found_by_pixels_not_by_bytes(tmp_path):
    make(tmp_path, GOOD)
    Image.open(tmp_path / "ax0.png").save(tmp_path / "bx0.png", compress_level=0)
    Image.open(tmp_path / "ax1.png").save(tmp_path / "ax2.png", compress_level=0)
    found = kinds(check_data(tmp_path))
    assert set(found) == {"duplicate-across-sites", "duplicate"}
    assert "ax0.png" in found["duplicate-across-sites"].examples[0]


def test_missing_columns_do_not_hide_the_rest(tmp_path):
    (tmp_path / "metadata.csv").write_text("image,dx\ngone.png,x\na,b,c\n")
    found = kinds(check_data(tmp_path))
    assert found["missing-column"].examples == ("label",)
    assert found["ragged-row"].count == 1
    assert found["missing-file"].count == 1


def test_a_table_without_sites_or_splits(tmp_path):
    make(tmp_path, [(name, label, "", "", "") for name, label, *_ in GOOD])
    report = check_data(tmp_path)
    assert {kind: found.severity for kind, found in kinds(report).items()} == {
        "no-sites": "warning",
        "no-split": "note",
    }
    assert report.fit


def test_what_cannot_be_read_at_all(tmp_path):
    report = check_data(tmp_path / "none")
    assert not report.fit
    assert report.findings[0].kind == "unreadable-source"
    assert check_data(make(tmp_path, [])).findings[0].kind == "no-images"


def test_folders_and_arrays_are_recognised(tmp_path):
    for site, label in [("a", "x"), ("a", "y"), ("b", "x")]:
        (tmp_path / "f" / site / label).mkdir(parents=True)
        shade = np.random.default_rng(len(site + label) + ord(site) + ord(label) * 7).integers(
            0, 256, (8, 8), dtype=np.uint8
        )
        Image.fromarray(shade).save(tmp_path / "f" / site / label / "1.png")
    assert kinds(check_data(tmp_path / "f"))["class-absent-from-site"].examples == ("y at b",)
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8), dtype=np.uint8)
    np.savez(
        tmp_path / "own.npz",
        train_images=images,
        train_labels=np.array([0, 1, 0]),
        test_images=images[:1],
        test_labels=np.array([0]),
    )
    assert "duplicate-across-splits" in kinds(check_data(tmp_path / "own.npz"))


def test_flambys_folder_is_recognised(tmp_path):
    (tmp_path / "train_test_split").write_text("image,target,center,fold\nISIC_1,0,1,train\nISIC_2,0,1,test\n")
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "ISIC_1.jpg")
    report = check_data(tmp_path)
    assert report.sites == ("vidir_molemax",)
    assert "ISIC_2.jpg" in kinds(report)["missing-file"].examples[0]


def test_options_say_how_to_read(tmp_path):
    make(tmp_path, [(n, label, site, "bad split", g) for n, label, site, _, g in GOOD])
    assert "unknown-split" in kinds(check_data(tmp_path))
    options = DataOptions(source="table", path="unused", split="group")
    assert check_data(tmp_path, options).findings == ()
    with_columns = DataOptions.model_validate({"source": "table", "path": "unused", "columns": {"site": "hospital"}})
    assert kinds(check_data(tmp_path, with_columns))["missing-column"].examples == ("hospital",)


@pytest.mark.parametrize("depth", [np.uint16])
def test_deep_images_and_several_frames_are_noted(tmp_path, depth):
    make(tmp_path, [*GOOD, ("deep.png", "x", "a", "train", ""), ("film.tif", "x", "a", "train", "")])
    Image.fromarray(np.arange(256, dtype=depth).reshape(16, 16) * 100).save(tmp_path / "deep.png")
    frames = [Image.fromarray(np.full((16, 16, 3), [9, i, 0], np.uint8)) for i in range(3)]
    frames[0].save(tmp_path / "film.tif", save_all=True, append_images=frames[1:])
    found = kinds(check_data(tmp_path))
    assert "deep.png" in found["deep-image"].examples[0]
    assert "film.tif) (3)" in found["several-frames"].examples[0]
