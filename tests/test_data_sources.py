"""MedMNIST and FedISIC: made-up files in their layouts."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wardround.data.fed_isic import CENTRES, CLASSES, read_fed_isic
from wardround.data.medmnist import read_medmnist
from wardround.data.sources import DATASETS, all_datasets
from wardround.errors import InputError, MissingExtra

pytest.importorskip("medmnist", reason="the extra wardround[medmnist] is not installed")


def npz(path: Path, labels: dict[str, list[int]], size: int = 28) -> Path:
    arrays = {}
    for split, values in labels.items():
        arrays[f"{split}_images"] = np.zeros((len(values), size, size), np.uint8)
        arrays[f"{split}_labels"] = np.array(values, np.uint8)[:, None]
    np.savez(path, **arrays)
    return path


def test_a_local_file_keeps_the_names_of_its_classes(tmp_path):
    file = npz(tmp_path / "pneumoniamnist_64.npz", {"train": [0, 1], "val": [1], "test": [0]}, 64)
    listing = read_medmnist(file, None, 28)
    assert listing.classes == ("normal", "pneumonia")
    assert [record.split for record in listing.records] == ["train", "train", "val", "test"]
    assert listing.records[2].name == "pneumoniamnist_64.npz#val_images[0]"
    assert listing.records[1].label == "pneumonia"


def test_a_flag_and_a_size_name_a_file_in_a_folder(tmp_path):
    npz(tmp_path / "bloodmnist_64.npz", {"train": [7], "test": [0]}, 64)
    listing = read_medmnist(tmp_path, "bloodmnist", 64)
    assert listing.label_space[7] == "platelet"
    assert len(listing.records) == 2


def test_an_unknown_file_has_numbers_for_classes(tmp_path):
    listing = read_medmnist(npz(tmp_path / "mine.npz", {"train": [0, 2]}), None, 28)
    assert listing.classes == ("0", "1", "2")
    assert "called by their numbers" in listing.notes[0]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("bloodmnst", "did you mean 'bloodmnist'"),
        ("chestmnist", "several labels"),
        ("organmnist3d", "volumes"),
    ],
)
def test_sets_that_cannot_be_used(tmp_path, flag, message):
    with pytest.raises(InputError, match=message):
        read_medmnist(tmp_path, flag, 28)


def test_a_file_with_several_labels_an_image_is_refused(tmp_path):
    np.savez(tmp_path / "m.npz", train_images=np.zeros((2, 4, 4), np.uint8), train_labels=np.zeros((2, 14)))
    with pytest.raises(InputError, match="14 labels an image"):
        read_medmnist(tmp_path / "m.npz", None, 28)


def test_files_that_are_none(tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 cut short")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    for name, message in {"bad": "not a readable", "other": "train_images", "gone": "no such file"}.items():
        with pytest.raises(InputError, match=message):
            read_medmnist(tmp_path / f"{name}.npz", None, 28)


def test_a_failed_download_says_what_to_do(tmp_path, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr("medmnist.PathMNIST", fails)
    with pytest.raises(InputError, match=r"Fetch pathmnist_128\.npz from https.*set data\.path"):
        read_medmnist(tmp_path / "new", "pathmnist", 128)


def test_without_the_package_a_flag_needs_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "medmnist", None)
    with pytest.raises(MissingExtra, match=r"wardround\[medmnist\]"):
        read_medmnist(tmp_path, "bloodmnist", 28)
    file = npz(tmp_path / "bloodmnist.npz", {"train": [0, 1]})
    assert read_medmnist(file, None, 28).classes == ("0", "1")
    assert all_datasets() == DATASETS


def test_the_list_of_data_sets():
    names = [entry.name for entry in all_datasets()]
    assert {"table", "folders", "fed-isic", "phantoms", "bloodmnist", "pathmnist"} <= set(names)
    assert "chestmnist" not in names
    assert len(names) == len(set(names))
    blood = next(entry for entry in all_datasets() if entry.name == "bloodmnist")
    assert "8 classes; train 11959, val 1712, test 3421" in blood.what


FOLDS = [  # image, target, center, fold
    ("ISIC_1", 0, 0, "train"),
    ("ISIC_2", 1, 2, "train"),
    ("ISIC_3", 1, 2, "test"),
    ("ISIC_4_downsampled", 7, 4, "test"),
]


def flamby(root: Path, images: str = "ISIC_2019_Training_Input_preprocessed") -> Path:
    (root / images).mkdir(parents=True, exist_ok=True)
    for name, *_ in FOLDS:
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(root / images / f"{name}.jpg")
    with (root / "train_test_split").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", *CLASSES, "UNK", "target", "center", "fold", "fold2"])
        for name, target, centre, fold in FOLDS:
            hot = [float(i == target) for i in range(9)]
            writer.writerow([name, *hot, target, centre, fold, f"{fold}_{centre}"])
    return root


@pytest.mark.parametrize("images", ["ISIC_2019_Training_Input_preprocessed", "ISIC_2019_Training_Input", "."])
def test_flambys_folder(tmp_path, images):
    listing = read_fed_isic(flamby(tmp_path, images))
    assert listing.classes == ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
    assert [record.label for record in listing.records] == ["MEL", "NV", "NV", "SCC"]
    assert [record.site for record in listing.records] == ["bcn", "vidir_modern", "vidir_modern", "msk"]
    assert [record.split for record in listing.records] == ["train", "train", "test", "test"]
    assert listing.sites == CENTRES
    assert all(record.image.path.is_file() for record in listing.records)
    assert "4 of 4 images have no known lesion" in listing.notes[0]


def test_lesions_from_both_metadata_files_and_their_leakage(tmp_path):
    flamby(tmp_path)
    (tmp_path / "HAM10000_metadata").write_text("lesion_id,image_id,dx\nHAM_1,ISIC_2,nv\nHAM_1,ISIC_3,nv\n")
    (tmp_path / "ISIC_2019_Training_Metadata.csv").write_text("image,lesion_id\nISIC_1,BCN_9\nISIC_2,\n")
    listing = read_fed_isic(tmp_path)
    assert [record.group for record in listing.records] == ["BCN_9", "HAM_1", "HAM_1", ""]
    assert listing.notes[-1].endswith("lesion is also in train: vidir_modern 1")


def test_the_fold_file_may_lie_elsewhere(tmp_path):
    root = flamby(tmp_path / "images")
    folds = tmp_path / "train_test_split"
    (root / "train_test_split").rename(folds)
    with pytest.raises(InputError, match=r"no fold file.*data\.fold_file"):
        read_fed_isic(root)
    assert len(read_fed_isic(root, fold_file=folds).records) == 4


def test_wrong_centre_and_class_are_named(tmp_path):
    flamby(tmp_path)
    good = (tmp_path / "train_test_split").read_text()
    for old, new, message in [
        (",0,0,train", ",0,6,train", "row 2.*'6' is no centre"),
        (",0,0,train", ",8,0,train", "row 2.*'8'"),
    ]:
        (tmp_path / "train_test_split").write_text(good.replace(old, new))
        with pytest.raises(InputError, match=message):
            read_fed_isic(tmp_path)


def test_a_table_with_flambys_columns(tmp_path):
    text = (
        "image,label,lesion_id,split,flamby_center,flamby_fold\na.jpg,akiec,L1,val,3,train\nb.jpg,NV,L1,val,5.0,test\n"
    )
    (tmp_path / "metadata.csv").write_text(text)
    official, own = read_fed_isic(tmp_path), read_fed_isic(tmp_path, official=False)
    assert [record.label for record in official.records] == ["AK", "NV"]
    assert [record.site for record in official.records] == ["rosendahl", "vienna_dias"]
    assert [record.split for record in official.records] == ["train", "test"]
    assert [record.split for record in own.records] == ["val", "val"]
    assert "vienna_dias 1" in official.notes[-1]
