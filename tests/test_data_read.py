"""From options to a federation, on small made-up sources."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from wardround.data.cache import decoded_cache
from wardround.data.federation import SPLITS, Federation
from wardround.data.options import DataOptions
from wardround.data.read import place_records, read_federation
from wardround.errors import InputError

Row = tuple[str, str, str, str, str]  # image, label, site, split, group
HEADER = ["image", "label", "site", "split", "group", "modality"]


def make(folder: Path, rows: list[Row], modality: str = "") -> Path:
    """A table with one small image a row, each with pixels of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [",".join(HEADER)]
    for name, *rest in rows:
        shade = hashlib.sha256(name.encode()).digest()[:27]
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.frombuffer(shade, np.uint8).reshape(3, 3, 3).repeat(4, 0).repeat(4, 1)).save(file)
        lines.append(",".join([name, *rest, modality]))
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    return folder


def grid(sites: int = 2, count: int = 20, split: bool = False, labels: str = "xy") -> list[Row]:
    """`count` images of each label at each site; with splits, 7 of 10 train, 1 val, 2 test."""
    return [
        (
            f"{s}_{label}_{i}.png",
            label,
            f"site{s}",
            ("test" if i % 10 > 7 else "val" if i % 10 > 6 else "train") * split,
            "",
        )
        for s in range(sites)
        for label in labels
        for i in range(count)
    ]


def read(folder: Path, seed: int = 0, **options: object) -> Federation:
    settings = DataOptions.model_validate({"source": "table", "path": str(folder), "image_size": 12, **options})
    return read_federation(settings, seed, cache=decoded_cache(folder / "cache"))


def test_a_table_with_splits_is_read_as_it_is(tmp_path):
    federation = read(make(tmp_path, grid(split=True), "ct"))
    assert federation.names == ("site0", "site1")
    assert federation.classes == ("x", "y")
    assert federation.modalities == ("ct",)
    assert federation.source == f"table: {tmp_path.name}"
    for split, count in zip(SPLITS, (14, 2, 4), strict=True):
        assert federation.counts(split).tolist() == [[count, count]] * 2
    sample = federation.client("site1").test
    for name, label, image in zip(sample.names, sample.labels, sample.images, strict=True):
        assert name.startswith(f"1_{federation.classes[label]}")
        assert np.array_equal(image, np.asarray(Image.open(tmp_path / name)))


def test_without_splits_one_is_drawn_and_groups_stay_whole(tmp_path):
    rows = [(n, label, site, split, f"g{i // 3}") for i, (n, label, site, split, _) in enumerate(grid(count=60))]
    federation = read(make(tmp_path, rows))
    home: dict[str, str] = {}
    group = {row[0]: row[4] for row in rows}
    for client in federation.clients:
        for split in SPLITS:
            for name in client.split(split).names:
                assert home.setdefault(group[name], split) == split
    assert federation.counts("train").tolist() == [[42, 42]] * 2
    assert federation.counts("test").tolist() == [[12, 12]] * 2
    assert any("split drawn here" in note for note in federation.notes)


def test_seeds_change_the_drawn_split_and_nothing_else_does(tmp_path):
    make(tmp_path, grid())
    one, again, other = (read(tmp_path, seed).client("site0").test.names for seed in (0, 0, 1))
    assert one == again != other


def test_missing_val_and_test_are_taken_out_of_train(tmp_path):
    rows = [(*row[:3], "train", "") for row in grid()]
    federation = read(make(tmp_path, rows), val_fraction=0.1)
    assert federation.counts("test").tolist() == [[4, 4]] * 2
    assert federation.counts("val").tolist() == [[2, 2]] * 2  # a tenth of the 16 that are left
    assert sum("was taken for it" in note for note in federation.notes) == 2


def test_a_source_with_test_but_no_val_keeps_its_train(tmp_path):
    rows = [(*row[:3], "test" if i % 2 else "train", "") for i, row in enumerate(grid())]
    federation = read(make(tmp_path, rows))
    assert federation.counts("val").sum() == 0
    assert federation.counts("train").tolist() == [[10, 10]] * 2


def test_a_fresh_split_ignores_the_column(tmp_path):
    rows = [(*row[:3], "test+train", "") for row in grid()]
    make(tmp_path, rows)
    with pytest.raises(InputError, match=r"row 2 .*'test\+train'.*data\.split = \"group\""):
        read(tmp_path)
    assert read(tmp_path, split="group").counts("test").tolist() == [[4, 4]] * 2


def test_caps_are_noted_and_stratified(tmp_path):
    federation = read(make(tmp_path, grid(split=True)), max_train_per_client=10, max_test_per_client=3)
    assert federation.counts("train").tolist() == [[5, 5]] * 2
    assert federation.counts("test").sum(axis=1).tolist() == [3, 3]
    assert "site0: train capped at 10 of 28 images" in federation.notes


def test_chosen_sites(tmp_path):
    make(tmp_path, grid(3, split=True))
    assert read(tmp_path, sites=["site2", "site0"]).names == ("site0", "site2")
    with pytest.raises(InputError, match=r"data\.sites: site9.*allowed: site0, site1, site2"):
        read(tmp_path, sites=["site9"])


def test_a_label_seen_only_in_test(tmp_path):
    rows = [*grid(split=True), ("odd.png", "z", "site0", "test", "")]
    with pytest.raises(InputError, match=r"'z' in row 82 \(odd\.png\)"):
        read(make(tmp_path, rows))
    elsewhere = [*rows, ("other.png", "z", "site1", "train", "")]
    federation = read(make(tmp_path, elsewhere))
    assert federation.classes == ("x", "y", "z")
    assert "tested but not trained at the same client: z at site0" in federation.notes


def test_empty_cells_are_named(tmp_path):
    make(tmp_path, [*grid(), ("n.png", "", "site0", "", "")])
    with pytest.raises(InputError, match=r"1 rows have no label: row 82 \(n\.png\)"):
        read(tmp_path)
    make(tmp_path, [(n, label, "", "", "") for n, label, *_ in grid()])
    with pytest.raises(InputError, match=r"have no site.*kind = \"dirichlet\""):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet-hsu", "quantity"])
@pytest.mark.parametrize("split", [True, False])
def test_random_clients_keep_every_image_once_and_groups_whole(tmp_path, kind, split):
    rows = [(n, label, "", s, f"{s}{label}{i // 2}") for i, (n, label, _, s, _) in enumerate(grid(split=split))]
    federation = read(make(tmp_path, rows), partition={"kind": kind, "clients": 3, "alpha": 0.5})
    assert federation.names == ("client-0", "client-1", "client-2")
    names = [name for client in federation.clients for s in SPLITS for name in client.split(s).names]
    assert sorted(names) == sorted(row[0] for row in rows)
    owner: dict[str, str] = {}
    group = {row[0]: row[4] for row in rows}
    for client in federation.clients:
        for s in SPLITS:
            assert all(owner.setdefault(group[name], client.name) == client.name for name in client.split(s).names)
    assert federation.counts("train").sum(axis=1).min() >= 1


def test_a_clients_test_classes_are_like_its_training_classes(tmp_path):
    make(tmp_path, grid(1, 200, split=True, labels="abcd"))
    federation = read(tmp_path, partition={"kind": "dirichlet", "clients": 4, "alpha": 0.3})
    for train, test in zip(federation.counts("train"), federation.counts("test"), strict=True):
        assert np.allclose(train / 140, test / 40, atol=0.03)


def test_clients_by_column_and_by_modality(tmp_path):
    make(tmp_path, [(n, label, "", s, f"g{i % 3}") for i, (n, label, _, s, _) in enumerate(grid(split=True))], "mr")
    assert read(tmp_path, partition={"kind": "column", "column": "group"}).names == ("g0", "g1", "g2")
    assert read(tmp_path, partition={"kind": "modality"}).names == ("mr",)
    with pytest.raises(InputError, match=r"'grup' is no column.*did you mean 'group'"):
        read(tmp_path, partition={"kind": "column", "column": "grup"})


def test_an_impossible_minimum_is_an_input_error(tmp_path):
    make(tmp_path, grid(1, 5))
    with pytest.raises(InputError, match=r"min_size asks for 50"):
        read(tmp_path, partition={"kind": "quantity", "clients": 3, "min_size": 50})


def test_bad_images_are_named_or_skipped(tmp_path):
    make(tmp_path, grid(split=True))
    (tmp_path / "0_x_0.png").write_bytes(b"broken")
    (tmp_path / "1_y_9.png").unlink()
    with pytest.raises(InputError, match=r"2 images cannot be read: .*0_x_0\.png.*1_y_9\.png.*on_bad_image"):
        read(tmp_path)
    federation = read(tmp_path, on_bad_image="skip")
    assert federation.counts("train").tolist() == [[13, 14], [14, 14]]
    assert federation.counts("test").tolist() == [[4, 4], [4, 3]]
    assert any(note.startswith("skipped (site0 1, site1 1)") for note in federation.notes)
    whole = federation.client("site1").test
    for name, image in zip(whole.names, whole.images, strict=True):
        assert np.array_equal(image, np.asarray(Image.open(tmp_path / name)))


def test_skipping_may_not_take_a_class_out_of_training(tmp_path):
    rows = [("a.png", "x", "s", "train", ""), ("b.png", "y", "s", "train", ""), ("c.png", "y", "s", "test", "")]
    make(tmp_path, rows)
    (tmp_path / "b.png").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"'y' in row 4 \(c\.png\)"):
        read(tmp_path, on_bad_image="skip")


def test_relative_paths_start_from_base(tmp_path):
    make(tmp_path / "my data (1)", grid(1, split=True))
    options = DataOptions(source="table", path="my data (1)", image_size=12)
    federation = read_federation(options, 0, tmp_path, decoded_cache(tmp_path / "cache"))
    assert federation.source == "table: my data (1)"


def test_folders(tmp_path):
    for name, label, site, *_ in grid():
        file = tmp_path / "images" / site / label / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((12, 12), np.uint8)).save(file)
    federation = read(tmp_path / "images", source="folders", channels=1)
    assert federation.names == ("site0", "site1")
    assert federation.clients[0].train.images.shape == (28, 12, 12, 1)


def test_placing_decodes_nothing(tmp_path):
    make(tmp_path, grid(split=True))
    for file in tmp_path.glob("*.png"):
        file.unlink()
    placement = place_records(DataOptions(source="table", path=str(tmp_path)), 0)
    assert len(placement.rows["site0"]["train"]) == 28


def test_stored_size_has_a_margin_for_the_random_crop():
    assert DataOptions(source="phantoms", image_size=200, augment="fed-isic").stored_size == 224
    assert DataOptions(source="phantoms", image_size=128, augment="fed-isic").stored_size == 144
    assert DataOptions(source="phantoms", image_size=128, augment="light").stored_size == 128


@pytest.mark.parametrize(
    "section",
    [
        {"source": "table"},
        {"source": "medmnist"},
        {"source": "table", "path": "x", "split": "official"},
        {"source": "table", "path": "x", "partition": {"kind": "column"}},
        {"source": "table", "path": "x", "partition": {"column": "a"}},
        {"source": "phantoms", "partition": {"kind": "column", "column": "a"}},
        {"source": "phantoms", "val_fraction": 0.5, "test_fraction": 0.5},
        {"source": "phantoms", "channels": 2},
        {"source": "phantoms", "image_sise": 3},
    ],
)
def test_sections_that_make_no_sense(section):
    with pytest.raises(ValidationError):
        DataOptions.model_validate(section)


def test_phantoms_with_caps_and_sites(tmp_path):
    section = {
        "source": "phantoms",
        "image_size": 16,
        "max_train_per_client": 6,
        "phantoms": {"clients": 2, "train_per_client": 8, "val_per_client": 0, "test_per_client": 4},
    }
    federation = read_federation(DataOptions.model_validate(section), 0)
    assert [len(client.train) for client in federation.clients] == [6, 6]
    assert federation.clients[0].train.images.shape[1:] == (16, 16, 3)
    one = read_federation(DataOptions.model_validate({**section, "sites": [federation.names[1]]}), 0)
    assert one.names == federation.names[1:]
    with pytest.raises(InputError, match=r"nowhere.*allowed"):
        read_federation(DataOptions.model_validate({**section, "sites": ["nowhere"]}), 0)
