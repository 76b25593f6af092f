"""MIMH: several MedMNIST sets in one federation, on small files of the published layout; and its forms without them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from wardround.config import Experiment, experiment_from
from wardround.data.benchmark_options import MIMH_SETS, MimhOptions
from wardround.data.cache import decoded_cache
from wardround.data.federation import SPLITS, Federation
from wardround.data.medmnist import file_name
from wardround.data.mimh import MODALITIES, read_mimh, union_classes
from wardround.data.npz_check import array_shapes, md5
from wardround.data.options import DataOptions
from wardround.data.read import place_records, read_federation
from wardround.errors import InputError, MissingExtra
from wardround.experiment import run
from wardround.models.backbones import load_backbone

medmnist = pytest.importorskip("medmnist", reason="the extra wardround[medmnist] is not installed")

EXAMPLES = Path(__file__).parents[1] / "examples"
CLASSES = {"retinamnist": 5, "bloodmnist": 8, "tissuemnist": 8, "pathmnist": 9, "dermamnist": 7}
GREY = ("tissuemnist", "pneumoniamnist")
UNCHECKED = MimhOptions(check=False)
SPLIT_SHARE = {"train": 6, "val": 1, "test": 2}


def made_file(folder: Path, flag: str, each: int = 1, size: int = 28) -> Path:
    """A file of the layout of one set: of every class 6, 1 and 2 times `each` images, shuffled."""
    rng = np.random.default_rng(len(flag))
    arrays = {}
    for split, times in SPLIT_SHARE.items():
        labels = rng.permutation(np.repeat(np.arange(CLASSES.get(flag, 2)), times * each))
        shape = (len(labels), size, size) if flag in GREY else (len(labels), size, size, 3)
        arrays[f"{split}_images"] = rng.integers(0, 256, shape, dtype=np.uint8)
        arrays[f"{split}_labels"] = labels[:, None].astype(np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / file_name(flag, size), **arrays)
    return folder / file_name(flag, size)


def made(folder: Path, each: int = 1, size: int = 28) -> Path:
    """A folder of all five sets."""
    for flag in MIMH_SETS:
        made_file(folder, flag, each, size)
    return folder


def options(folder: Path, mimh: dict[str, object] | None = None, **section: object) -> DataOptions:
    inner = {"check": False, **(mimh or {})}
    return DataOptions.model_validate(
        {"source": "mimh", "path": str(folder), "image_size": 28, "mimh": inner, **section}
    )


def read(folder: Path, mimh: dict[str, object] | None = None, seed: int = 0, **section: object) -> Federation:
    return read_federation(options(folder, mimh, **section), seed, cache=decoded_cache(folder / "cache"))


def example(name: str, folder: Path, **changes: object) -> Experiment:
    """An experiment of examples/ on the files in `folder`."""
    given = experiment_from(tomllib.loads((EXAMPLES / f"{name}.toml").read_text()), name)
    fixed = {"data.path": str(folder), "data.size": 28, "data.image_size": 28, "data.mimh.check": False}
    return given.changed(fixed | {key.replace("__", "."): value for key, value in changes.items()}, name)


# ---- labels, modalities, splits


def test_offsets_are_fixed_and_classes_are_named_by_set() -> None:
    classes = union_classes(MIMH_SETS)
    assert len(classes) == 37
    firsts = [next(i for i, name in enumerate(classes) if name.startswith(flag)) for flag in MIMH_SETS]
    assert firsts == [0, 5, 13, 21, 30]
    assert [classes[i] for i in (0, 12, 13, 29, 34)] == [
        "retinamnist:0",
        "bloodmnist:platelet",
        "tissuemnist:Collecting Duct, Connecting Tubule",
        "pathmnist:colorectal adenocarcinoma epithelium",
        "dermamnist:melanoma",
    ]


@pytest.mark.parametrize("used", [MIMH_SETS[:3], ("dermamnist",), ("pathmnist", "retinamnist")])
def test_fewer_sets_keep_all_37_classes(used: tuple[str, ...]) -> None:
    assert union_classes(used) == union_classes(MIMH_SETS)  # type: ignore[arg-type]


def test_other_sets_come_after_the_five() -> None:
    classes = union_classes(("pneumoniamnist", "retinamnist"))
    assert classes[37:] == ("pneumoniamnist:normal", "pneumoniamnist:pneumonia")


def test_every_set_of_the_list_has_a_modality_and_is_known_to_medmnist() -> None:
    assert len(set(MODALITIES.values())) == len(MODALITIES) == 11
    assert all(medmnist.INFO[flag]["task"] != "multi-label, binary-class" for flag in MODALITIES)


def test_stand_alone_is_one_client_a_set_with_its_official_split(tmp_path: Path) -> None:
    federation = read(made(tmp_path))
    assert federation.names == MIMH_SETS
    assert federation.modalities == tuple(MODALITIES[flag] for flag in MIMH_SETS)
    first = 0
    for number, (client, width) in enumerate(zip(federation.clients, CLASSES.values(), strict=True)):
        for split, times in SPLIT_SHARE.items():
            part = client.split(split)
            assert part.counts(37).tolist() == [times if first <= c < first + width else 0 for c in range(37)]
            assert set(part.modality.tolist()) == {number}
            assert all(f"{split}_images" in name for name in part.names)
        first += width


def test_an_image_keeps_its_pixels_and_its_label_and_grey_ones_are_repeated(tmp_path: Path) -> None:
    federation = read(made(tmp_path))
    for flag, first in (("tissuemnist", 13), ("dermamnist", 30)):
        stored = np.load(tmp_path / f"{flag}.npz")
        test = federation.client(flag).test
        assert test.images.shape[1:] == (28, 28, 3)
        assert test.labels.tolist() == (stored["test_labels"][:, 0] + first).tolist()
        pixels = stored["test_images"]
        assert np.array_equal(test.images, pixels if pixels.ndim == 4 else np.repeat(pixels[..., None], 3, axis=3))


@pytest.mark.parametrize("size", [64, 128, 224])
def test_larger_files_have_their_size_in_their_name(tmp_path: Path, size: int) -> None:
    made_file(tmp_path, "retinamnist", size=size)
    assert (tmp_path / f"retinamnist_{size}.npz").is_file()
    federation = read(tmp_path, {"sets": ["retinamnist"]}, size=size, image_size=size)
    assert federation.clients[0].train.images.shape == (30, size, size, 3)


def test_domains_take_the_first_sets(tmp_path: Path) -> None:
    made(tmp_path)
    for count in (4, 3):
        federation = read(tmp_path, {"domains": count})
        assert federation.names == MIMH_SETS[:count]
        assert len(federation.classes) == 37
        assert len(federation.modalities) == count
    assert read(tmp_path, {"sets": ["pathmnist", "bloodmnist"]}).names == ("pathmnist", "bloodmnist")


def test_the_networks_normalisation_is_its_own_half_and_half() -> None:
    backbone = load_backbone("wardround:resnet4", channels=3, image_size=28, pretrained=False, seed=0)
    assert (backbone.mean, backbone.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


# ---- ten clients


MIXED = {"kind": "dirichlet", "clients": 10, "alpha": 0.3, "min_size": 64, "min_test_size": 16}


def test_ten_clients_have_each_image_once_and_at_least_64_and_16(tmp_path: Path) -> None:
    made(tmp_path, each=10)
    federation = read(tmp_path, partition=MIXED)
    assert federation.names == tuple(f"client-{k}" for k in range(10))
    for split, times in SPLIT_SHARE.items():
        assert federation.counts(split).sum(axis=0).tolist() == [10 * times] * 37
        names = [name for client in federation.clients for name in client.split(split).names]
        assert len(set(names)) == len(names) == 37 * 10 * times
    assert federation.counts("train").sum(axis=1).min() >= 64
    assert federation.counts("test").sum(axis=1).min() >= 16


def test_every_class_is_dealt_by_the_same_shares_in_train_val_and_test(tmp_path: Path) -> None:
    """A share of N images is right to within one image, as a client's part lies between two rounded sums."""
    made(tmp_path, each=10)
    federation = read(tmp_path, partition=MIXED)
    train, val, test = (federation.counts(split) for split in SPLITS)
    assert np.abs(train / 60 - test / 20).max() <= 1 / 60 + 1 / 20
    assert np.abs(train / 60 - val / 10).max() <= 1 / 60 + 1 / 10
    assert np.std(train / 60, axis=0).mean() > 0.1  # and they are not all alike


def test_clients_are_redrawn_for_their_test_images(tmp_path: Path) -> None:
    """The first draw leaves a client 53 test images."""
    made(tmp_path, each=10)
    few = read(tmp_path, partition={**MIXED, "alpha": 0.1, "min_test_size": 0, "min_size": 1})
    many = read(tmp_path, partition={**MIXED, "alpha": 0.1, "min_test_size": 55, "min_size": 1})
    assert few.counts("test").sum(axis=1).min() == 53
    assert many.counts("test").sum(axis=1).min() >= 55


def test_a_minimum_that_cannot_be_met_is_an_input_error(tmp_path: Path) -> None:
    """Ten test images, so that two clients cannot have six each."""
    made_file(tmp_path, "retinamnist")
    partition = {"kind": "quantity", "clients": 2, "alpha": 100.0, "min_test_size": 6}
    with pytest.raises(InputError, match=r"at most 15 training and 5 test images.*min_test_size for 6"):
        place_records(options(tmp_path, {"sets": ["retinamnist"]}, partition=partition), 0)
    with pytest.raises(InputError, match="min_test_size needs images that are said to be for testing"):
        place_records(options(tmp_path, {"sets": ["retinamnist"]}, split="group", partition=partition), 0)


# ---- caps and the shared label space


def test_caps_are_by_set_stratified_and_seeded(tmp_path: Path) -> None:
    made(tmp_path, each=2)
    caps = {"cap_per_dataset": 40, "cap_test_per_dataset": 16}
    federation = read(tmp_path, caps)
    assert federation.counts("train").sum(axis=1).tolist() == [40] * 5
    assert federation.counts("val").sum(axis=1).tolist() == [10, 16, 16, 16, 14]  # 2 a class, and 16 at most
    assert federation.counts("test").sum(axis=1).tolist() == [16] * 5
    train = federation.counts("train")
    assert np.ptp(train[0, :5]) == 0
    assert np.ptp(train[1, 5:13]) == 0
    assert np.ptp(train[3, 21:30]) <= 1
    assert "pathmnist: train capped at 40 of 108 images before images were dealt" in federation.notes
    again, other = read(tmp_path, caps), read(tmp_path, caps, seed=1)
    assert again.client("pathmnist").train.names == federation.client("pathmnist").train.names
    assert other.client("pathmnist").train.names != federation.client("pathmnist").train.names


def test_capped_sets_are_dealt_whole(tmp_path: Path) -> None:
    made(tmp_path, each=2)
    federation = read(tmp_path, {"cap_per_dataset": 40}, partition={"kind": "dirichlet", "clients": 3, "alpha": 1.0})
    assert federation.counts("train").sum() == 200
    assert federation.counts("test").sum() == 37 * 4


@pytest.mark.parametrize("partition", [{"kind": "site"}, {**MIXED, "min_size": 1, "min_test_size": 0}])
def test_in_the_shared_space_labels_collide_and_all_else_is_the_same(tmp_path: Path, partition: dict) -> None:
    made(tmp_path, each=2)
    union = read(tmp_path, partition=partition)
    shared = read(tmp_path, {"label_space": "shared"}, partition=partition)
    assert shared.classes == tuple(str(k) for k in range(9))
    offsets = np.repeat([0, 5, 13, 21, 30], list(CLASSES.values()))
    for one, other in zip(union.clients, shared.clients, strict=True):
        for split in SPLITS:
            assert one.split(split).names == other.split(split).names
            labels = one.split(split).labels
            assert other.split(split).labels.tolist() == (labels - offsets[labels]).tolist()


# ---- what can be wrong


def test_missing_files_are_named_with_their_addresses(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "bloodmnist.npz").unlink()
    (tmp_path / "dermamnist.npz").unlink()
    message = r"2 of 5 files are missing; fetch bloodmnist\.npz from https.*; dermamnist\.npz from https"
    with pytest.raises(InputError, match=message):
        read_mimh(tmp_path, UNCHECKED, 28)


def test_a_wrong_checksum_names_the_file_and_can_be_waived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = made_file(tmp_path, "pneumoniamnist", size=64)
    chosen = MimhOptions(sets=("pneumoniamnist",))
    with pytest.raises(InputError, match=r"pneumoniamnist_64\.npz: its checksum.*at 64 pixels.*data\.mimh\.check"):
        read_mimh(tmp_path, chosen, 64)
    waived = read_mimh(tmp_path, chosen.model_copy(update={"check": False}), 64)
    assert "were not compared" in waived.notes[0]
    monkeypatch.setitem(medmnist.INFO["pneumoniamnist"], "MD5_64", md5(file))
    assert len(read_mimh(tmp_path, chosen, 64).records) == 18
    made_file(tmp_path, "pneumoniamnist", each=2, size=64)
    with pytest.raises(InputError, match="its checksum"):
        read_mimh(tmp_path, chosen, 64)


def test_md5_is_that_of_rfc_1321(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"message digest")
    assert md5(tmp_path / "a") == "f96b697d7cb7938d525a2f31aaf161d0"


def spoilt(file: Path, **changes: np.ndarray | None) -> None:
    """Write the file again with other arrays, or without those that are None."""
    with np.load(file) as arrays:
        kept = {**arrays, **changes}
    np.savez(file, **{name: array for name, array in kept.items() if array is not None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_images": None, "val_labels": None}, r"no array val_images, no array val_labels; it holds"),
        ({"test_images": np.zeros((4, 64, 64), np.uint8)}, r"shape \(4, 64, 64\); data\.size = 28 asks for 28"),
        ({"test_labels": np.zeros((3, 1), np.uint8)}, r"differ in length: \(4, 28, 28\) and \(3, 1\)"),
        ({"val_labels": np.array([[0], [5]], np.uint8)}, r"labels go up to 5; pneumoniamnist has classes 0 to 1"),
    ],
)
def test_wrong_arrays_are_named(tmp_path: Path, changes: dict, message: str) -> None:
    file = made_file(tmp_path, "pneumoniamnist")
    spoilt(file, **changes)
    with pytest.raises(InputError, match=rf"pneumoniamnist\.npz: .*{message}"):
        read_mimh(tmp_path, MimhOptions(sets=("pneumoniamnist",), check=False), 28)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    whole = made_file(tmp_path, "pneumoniamnist").read_bytes()
    (tmp_path / "pneumoniamnist.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"pneumoniamnist\.npz: not a readable \.npz file"):
        read_mimh(tmp_path, MimhOptions(sets=("pneumoniamnist",), check=False), 28)


def test_shapes_come_from_the_headers(tmp_path: Path) -> None:
    shapes = array_shapes(made_file(tmp_path, "retinamnist"))
    assert shapes["train_images"] == (30, 28, 28, 3)
    assert shapes["train_labels"] == (30, 1)


def test_without_a_path_the_package_fetches_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def fetch(flag: str, size: int, file: Path) -> None:
        asked.append((flag, size))
        made_file(file.parent, flag, size=size)

    monkeypatch.setattr("wardround.data.mimh.default_root", lambda: tmp_path)
    monkeypatch.setattr("wardround.data.mimh.download", fetch)
    made_file(tmp_path, "bloodmnist")
    federation = read_federation(
        DataOptions.model_validate({"source": "mimh", "image_size": 28, "mimh": {"check": False}}), 0
    )
    assert asked == [(flag, 28) for flag in MIMH_SETS if flag != "bloodmnist"]
    assert federation.source == "mimh: retinamnist, bloodmnist, tissuemnist, pathmnist, dermamnist"


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "medmnist", None)
    with pytest.raises(MissingExtra, match=r"wardround\[medmnist\]"):
        read_mimh(tmp_path, UNCHECKED, 28)


@pytest.mark.parametrize(
    "section",
    [
        {"sets": []},
        {"sets": ["bloodmnist", "bloodmnist"]},
        {"sets": ["chestmnist"]},
        {"domains": 6},
        {"domains": 0},
        {"cap_per_dataset": 0},
        {"label_space": "masked"},
    ],
)
def test_sections_that_make_no_sense(section: dict) -> None:
    with pytest.raises(ValidationError):
        DataOptions.model_validate({"source": "mimh", "mimh": section})


# ---- the examples


def test_the_stand_alone_example_runs(tmp_path: Path) -> None:
    """One round of the example's method, on made-up files and a small network."""
    fixed = {"training.memory_format": "contiguous", "training.depthwise": "library", "training.device": "cpu"}
    experiment = example("mimh_stand_alone", made(tmp_path / "data"), rounds=1, transport__workers=1)
    small = {"model.backbone": "wardround:resnet4-lib", "data.mimh.cap_per_dataset": 10, "data.image_size": 16}
    results = run(experiment.changed(fixed | small, "small"), tmp_path / "out")
    assert set(results["clients"]) == set(MIMH_SETS)


def test_the_5_domain_example_deals_to_ten_clients(tmp_path: Path) -> None:
    experiment = example("mimh_5domain", made(tmp_path, each=10))
    federation = read_federation(experiment.data, 0, cache=decoded_cache(tmp_path / "cache"))
    assert len(federation.clients) == 10
    assert len(federation.classes) == 37
    assert federation.counts("test").sum(axis=1).min() >= 16


# ---- the same forms without MedMNIST


def phantoms(phantoms: dict | None = None, **section: object) -> Federation:
    keys = {"family": "mixed", "clients": 5, "classes": 4, "train_per_client": 24, "val_per_client": 4}
    inner = {**keys, "test_per_client": 8, **(phantoms or {})}
    given = {"source": "phantoms", "image_size": 16, "phantoms": inner, **section}
    return read_federation(DataOptions.model_validate(given), 0)


def test_phantoms_of_five_families_are_dealt_to_ten_clients_by_union_class() -> None:
    whole, dealt = phantoms(), phantoms(partition={**MIXED, "min_size": 3, "min_test_size": 1})
    assert len(dealt.clients) == 10
    assert dealt.classes == whole.classes
    assert dealt.modalities == whole.modalities
    for split in SPLITS:
        assert dealt.counts(split).sum(axis=0).tolist() == whole.counts(split).sum(axis=0).tolist()
        images = {
            name: k for c in whole.clients for k, name in zip(c.split(split).images, c.split(split).names, strict=True)
        }
        for client in dealt.clients:
            part = client.split(split)
            assert np.array_equal(part.labels // 4, part.modality)
            assert all(np.array_equal(images.get(n), image) for n, image in zip(part.names, part.images, strict=True))
    assert dealt.counts("train").sum(axis=1).min() >= 3
    assert dealt.counts("test").sum(axis=1).min() >= 1
    assert max(len(set(client.train.modality.tolist())) for client in dealt.clients) > 1
    assert "were dealt to 10 clients (dirichlet)" in dealt.notes[-1]


def test_phantoms_of_five_families_stand_alone_at_five_clients() -> None:
    federation = phantoms()
    assert [set(client.train.modality.tolist()) for client in federation.clients] == [{k} for k in range(5)]
    assert phantoms(partition={"kind": "modality"}).names == tuple(sorted(federation.modalities))


def test_a_family_that_is_held_out_is_not_dealt() -> None:
    federation = phantoms(held_out=["site-02"], partition={"kind": "dirichlet", "clients": 3, "alpha": 1.0})
    assert [site.name for site in federation.held_out] == ["site-02"]
    assert all(1 not in client.train.modality for client in federation.clients)
    with pytest.raises(InputError, match=r"data\.held_out leaves no image to deal"):
        phantoms({"clients": 1}, held_out=["site-01"], partition={"kind": "quantity", "clients": 2})


def test_phantom_caps_are_those_of_the_new_clients() -> None:
    federation = phantoms(max_train_per_client=4, partition={"kind": "dirichlet", "clients": 3, "alpha": 1.0})
    assert federation.counts("train").sum(axis=1).tolist() == [4, 4, 4]
    assert sum("train capped at 4" in note for note in federation.notes) == 3


def test_a_table_with_a_modality_column_stands_alone(shared: Path) -> None:
    """Real images of six modalities: six clients whose classes have nothing in common."""
    section = {"path": "multimodal_sa", "partition": {"kind": "modality"}, "image_size": 24}
    placed = place_records(DataOptions.model_validate(section), 0, shared)
    assert set(placed.rows) == {"blood_microscopy", "ct", "dermoscopy", "histopathology", "mri", "xray"}
    labels = {
        client: {placed.listing.records[row].label for rows in splits.values() for row in rows}
        for client, splits in placed.rows.items()
    }
    assert sum(len(found) for found in labels.values()) == len(set.union(*labels.values())) == 22
    assert {client: len(splits["test"]) for client, splits in placed.rows.items()} == {
        "blood_microscopy": 300, "ct": 300, "dermoscopy": 300, "histopathology": 273, "mri": 300, "xray": 185,
    }  # fmt: skip
