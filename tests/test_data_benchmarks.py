"""Benchmarks by name: made-up miniature folders in the published layouts, and the examples that read them."""

from __future__ import annotations

import csv
import gzip
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from wardround.config import Experiment, experiment_from
from wardround.data import volumes
from wardround.data.benchmark_options import BratsOptions, Isic2019Options, SliceOptions
from wardround.data.bladder_mri import read_bladder_mri
from wardround.data.brats import read_brats
from wardround.data.cache import DecodedCache
from wardround.data.checking import check_data, guess_options
from wardround.data.dicom import read_dicom
from wardround.data.federation import Federation
from wardround.data.images import Decoding
from wardround.data.isic2019 import SITES, read_isic2019
from wardround.data.narrowing import narrowed
from wardround.data.options import DataOptions
from wardround.data.read import place_records, read_federation
from wardround.data.records import ImageRef, Listing, Record, parse_ref
from wardround.data.remembering import remembered
from wardround.data.rsna_ich import SUBTYPES, read_rsna_ich
from wardround.data.slice_choice import spread
from wardround.data.volumes import VolumeShelf, read_volume, slice_of, windowed
from wardround.errors import InputError, MissingExtra
from wardround.experiment import run

nibabel = pytest.importorskip("nibabel", reason="extra `nifti` not installed")
pydicom = pytest.importorskip("pydicom", reason="extra `dicom` not installed")

EXAMPLES = Path(__file__).parents[1] / "examples"
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])  # how BraTS stores its volumes
SHARED = BratsOptions()


def noise(shape: tuple[int, ...], seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(1, 256, shape, dtype=np.uint8)


def save_volume(file: Path, voxels: NDArray[Any], affine: NDArray[Any] = LPS) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, affine), file)
    return file


# ---- volumes


@pytest.mark.parametrize("axes", ["RAS", "LPS", "PIR", "SAL"])
def test_slices_are_shown_as_radiologists_do_however_the_file_is_stored(tmp_path: Path, axes: str) -> None:
    """A mark at the patient's right, in front, in the third layer from below."""
    voxels = np.zeros((4, 5, 6), np.int16)
    voxels[3, 4, 2] = 9
    plain = nibabel.Nifti1Image(voxels, np.eye(4))
    target = nibabel.orientations.axcodes2ornt(axes)
    nibabel.save(
        plain.as_reoriented(nibabel.orientations.ornt_transform(nibabel.io_orientation(np.eye(4)), target)),
        tmp_path / "v.nii",
    )
    volume = read_volume(tmp_path / "v.nii")
    assert np.argwhere(slice_of(volume, "axial", 2)).tolist() == [[0, 0]]
    assert np.argwhere(slice_of(volume, "coronal", 4)).tolist() == [[3, 0]]
    assert np.argwhere(slice_of(volume, "sagittal", 3)).tolist() == [[3, 0]]
    assert [slice_of(volume, plane, 0).shape for plane in ("axial", "coronal", "sagittal")] == [(5, 4), (6, 4), (6, 5)]


def test_the_window_is_that_of_the_voxels_that_are_not_0() -> None:
    """Of 1 to 101 the percentiles 1 and 99 are 2 and 100; a thousand zeros do not move them."""
    volume = np.concatenate([np.zeros(1000), np.arange(1, 102)]).astype(np.float32)[None, None]
    found = dict(zip(volume.ravel().tolist(), windowed(volume).ravel().tolist(), strict=True))
    assert [found[value] for value in (0, 1, 2, 51, 100, 101)] == [0, 0, 0, 128, 255, 255]
    assert not windowed(np.zeros((2, 2, 2), np.float32)).any()


@pytest.mark.parametrize(
    ("counts", "number", "share", "chosen"),
    [
        ([0, 1, 8, 9, 8, 7, 1], 2, 0.5, [3, 5]),
        ([0, 1, 8, 9, 8, 7, 1], 9, 0.5, [2, 3, 4, 5]),
        ([5] * 10, 1, 0.0, [5]),
        ([5] * 9, 3, 1.0, [1, 4, 7]),
        ([3, 0, 3], 9, 0.0, [0, 2]),
        ([0, 0], 3, 0.0, []),
    ],
)
def test_slices_are_spread_evenly(counts: list[int], number: int, share: float, chosen: list[int]) -> None:
    assert spread(counts, number, share) == chosen


def test_a_volume_is_read_once_for_its_slices_and_never_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [save_volume(tmp_path / f"{i}.nii.gz", noise((6, 7, 8), i)) for i in range(2)]
    seen: list[Path] = []

    def spy(path: Path, like: Path | None = None) -> NDArray[np.float32]:
        seen.append(path)
        return read_volume(path, like)

    monkeypatch.setattr(volumes, "read_volume", spy)
    refs = [ImageRef(file, "axial", index) for file in files for index in range(8)]
    first = DecodedCache(tmp_path / "cache").decode(refs, Decoding(8, 1))
    assert seen == files
    again = DecodedCache(tmp_path / "cache").decode(refs, Decoding(8, 1))
    assert seen == files
    assert np.array_equal(first.images, again.images)
    assert len({image.tobytes() for image in first.images}) == 16


def test_the_shelf_forgets_what_was_used_longest_ago(tmp_path: Path) -> None:
    shelf = VolumeShelf(keep=2)
    for index in (0, 1, 0, 2):
        shelf.slice(save_volume(tmp_path / f"{index}.nii", noise((3, 3, 3), index)), "axial", 0)
    assert [path.name for path in shelf._volumes] == ["0.nii", "2.nii"]


def test_wrong_volumes_are_named(tmp_path: Path) -> None:
    save_volume(tmp_path / "four.nii.gz", noise((2, 2, 2, 2), 0))
    save_volume(tmp_path / "good.nii.gz", noise((20, 20, 20), 0))
    (tmp_path / "none.nii.gz").write_bytes(b"no volume")
    (tmp_path / "cut.nii.gz").write_bytes((tmp_path / "good.nii.gz").read_bytes()[:4000])
    (tmp_path / "short.nii.gz").write_bytes(gzip.compress(b"\0" * 100))
    for ref, message in {
        "four.nii.gz#axial[0]": "four.nii.gz.*three dimensions",
        "none.nii.gz#axial[0]": "none.nii.gz: not a readable NIfTI volume",
        "cut.nii.gz#axial[0]": "cut.nii.gz: not a readable NIfTI volume",
        "short.nii.gz#axial[0]": "short.nii.gz: not a readable NIfTI volume",
        "gone.nii#axial[0]": "gone.nii: no such file",
        "good.nii.gz#axial[20]": "good.nii.gz: there is no axial slice 20, the volume has 20",
        "good.nii.gz#oblique[0]": "'oblique' is no plane",
    }.items():
        found = parse_ref(ref, tmp_path)
        assert str(found) == str(tmp_path / ref)
        with pytest.raises(InputError, match=message):
            VolumeShelf().slice(found.path, found.array, found.index)
    with pytest.raises(InputError, match="shape is \\(20, 20, 20\\)"):
        read_volume(tmp_path / "good.nii.gz", save_volume(tmp_path / "small.nii", noise((2, 2, 2), 0)))


def test_a_missing_package_is_named_and_is_no_fault_of_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that kept the failure would still fail once the package is there."""
    ref = ImageRef(save_volume(tmp_path / "v.nii", noise((4, 4, 4), 0)), "axial", 1)
    with monkeypatch.context() as without:
        without.setitem(__import__("sys").modules, "nibabel", None)
        with pytest.raises(MissingExtra, match=r"wardround\[nifti\]"):
            DecodedCache(tmp_path / "cache").decode([ref], Decoding(8))
    assert len(DecodedCache(tmp_path / "cache").decode([ref], Decoding(8)).images) == 1


def test_what_was_found_out_is_remembered_until_a_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("1")
    assert remembered("test", [file], lambda: [1]) == [1]
    assert remembered("test", [file], lambda: [2]) == [1]
    assert remembered("other", [file], lambda: [3]) == [3]
    file.write_text("22")
    assert remembered("test", [file], lambda: [4]) == [4]


# ---- DICOM


def save_dicom(file: Path, pixels: NDArray[np.int16], patient: str, intercept: int = -1000) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    made = pydicom.Dataset()
    made.file_meta = pydicom.dataset.FileMetaDataset()
    made.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    made.file_meta.MediaStorageSOPClassUID = made.SOPClassUID = pydicom.uid.CTImageStorage
    made.file_meta.MediaStorageSOPInstanceUID = made.SOPInstanceUID = pydicom.uid.generate_uid()
    made.PatientID, made.Rows, made.Columns = patient, *pixels.shape
    made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
    made.BitsAllocated = made.BitsStored = 16
    made.HighBit, made.PixelRepresentation = 15, 1
    made.RescaleSlope, made.RescaleIntercept = 1, intercept
    made.PixelData = pixels.tobytes()
    made.save_as(file, enforce_file_format=True)
    return file


def test_the_brain_window_is_0_to_80_hounsfield_units(tmp_path: Path) -> None:
    file = save_dicom(tmp_path / "a.dcm", np.array([[0, 1000, 1016], [1040, 1080, 3000]], np.int16), "p")
    assert read_dicom(file, "brain").tolist() == [[0, 0, 51], [128, 255, 255]]
    (tmp_path / "b.dcm").write_bytes(file.read_bytes()[:300])
    for window, name, message in [
        ("lung", "a.dcm", "'lung' is no window"),
        ("brain", "b.dcm", "b.dcm: not a readable DICOM file"),
        ("brain", "c.dcm", "c.dcm: no such file"),
    ]:
        with pytest.raises(InputError, match=message):
            read_dicom(tmp_path / name, window)
    with pytest.raises(InputError, match="a frame 1"):
        read_dicom(file, "brain", 1)


# ---- narrowing


def listed(*rows: tuple[str, str, str]) -> Listing:
    """Records of site, label and split."""
    made = (Record(ImageRef(Path(str(i))), str(i), label, site, split) for i, (site, label, split) in enumerate(rows))
    return Listing(tuple(made), "rows", ("x", "y", "z"))


def options(**more: Any) -> DataOptions:
    return DataOptions(path="unused", **more)


def test_small_sites_are_left_out_and_named() -> None:
    rows = listed(*[("a", "x", "")] * 3, *[("b", "x", "")] * 2, ("c", "x", ""))
    found = narrowed(rows, options(min_site_images=2))
    assert [record.site for record in found.records] == list("aaabb")
    assert found.notes == ("sites with fewer than 2 images left out: c (1)",)
    assert narrowed(rows, options()) is rows
    with pytest.raises(InputError, match=r"no site has 4 images .*a \(3\), b \(2\), c \(1\)"):
        narrowed(rows, options(min_site_images=4))
    with pytest.raises(InputError, match="have no site"):
        narrowed(listed(("", "x", "")), options(min_site_images=1))


def test_common_classes_have_a_training_image_at_every_site() -> None:
    rows = listed(("a", "x", "train"), ("a", "y", "train"), ("b", "x", "train"), ("b", "y", "test"), ("b", "z", "val"))
    found = narrowed(rows, options(common_classes=True))
    assert found.classes == ("x",)
    assert {record.label for record in found.records} == {"x"}
    assert found.notes == ("classes that some site has no training image of left out: y (2), z (1)",)
    afresh = narrowed(rows, options(common_classes=True, split="group"))
    assert afresh.classes == ("x", "y")
    assert narrowed(rows, options(common_classes=True, held_out=("b",))).classes == ("x", "y")
    with pytest.raises(InputError, match="no class has training images at every site"):
        narrowed(listed(("a", "x", ""), ("b", "y", "")), options(common_classes=True))


def test_phantoms_are_not_narrowed() -> None:
    for more in ({"min_site_images": 3}, {"common_classes": True}):
        with pytest.raises(ValueError, match="phantoms make their own sites"):
            DataOptions(source="phantoms", **more)  # type: ignore[arg-type]


# ---- ISIC 2019

COMMON = ("MEL", "NV", "AK", "BKL", "VASC", "SCC")
COLUMNS = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC", "UNK")


def isic_rows() -> list[tuple[str, str, str, str]]:
    """Image, class, site and lesion: three lesions of each common class at every site, and the traps."""
    sites = (*SITES, "")
    rows = [
        (f"ISIC_{site}_{label}_{i}".replace("/", "-").replace(" ", "-"), label, site, f"{site}{label}{i // 2}")
        for site in sites
        for label in COMMON
        for i in range(6)
    ]
    rows += [("ISIC_bcc", "BCC", "head/neck", "L1"), ("ISIC_lateral", "NV", "lateral torso", "L2")]
    rows += [("ISIC_twin", "NV", "palms/soles", ""), ("ISIC_torn", "MEL", "", "palms/solesMEL0")]
    return [*rows, ("ISIC_alone_downsampled", "NV", "palms/soles", "")]


def isic(folder: Path) -> Path:
    (folder / "ISIC_2019_Training_Input").mkdir(parents=True)
    rows = isic_rows()
    for number, (name, *_) in enumerate(rows):
        file = folder / "ISIC_2019_Training_Input" / f"{name}.jpg"
        Image.fromarray(noise((9, 12, 3), number)).save(file)
    first = folder / "ISIC_2019_Training_Input" / f"{rows[0][0]}.jpg"
    first.with_stem("ISIC_twin").write_bytes(first.read_bytes())
    with (folder / "ISIC_2019_Training_GroundTruth.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("image", *COLUMNS), *((name, *(float(label == one) for one in COLUMNS)) for name, label, *_ in rows)]
        )
    with (folder / "ISIC_2019_Training_Metadata.csv").open("w", newline="") as file:
        head = ("image", "age_approx", "anatom_site_general", "lesion_id", "sex")
        csv.writer(file).writerows([head, *((name, 50, site, lesion, "female") for name, _, site, lesion in rows)])
    return folder


def test_isic_by_site(tmp_path: Path) -> None:
    found = read_isic2019(isic(tmp_path), Isic2019Options())
    assert found.sites == (*SITES, "unknown")
    assert len(found.records) == 7 * 6 * 6 + 2
    assert found.notes == (
        "1 images left out: their site is lateral torso or oral/genital, which the paper does not use",
        "1 images left out: they are the same file as an earlier one",
        "1 images left out: their site is not recorded, but other images of their lesion are at a site",
        "1 of 254 images have no known lesion; each is a group of its own",
        "classes that all 7 sites have (6): MEL, NV, AK, BKL, VASC, SCC",
    )
    assert found.records[0].where == "row 2 (ISIC_anterior-torso_MEL_0)"
    dropped = read_isic2019(tmp_path, Isic2019Options(without_lesion="drop"))
    assert dropped.notes[0] == "2 images left out: their lesion is not recorded"
    assert all(record.group for record in dropped.records)


def test_the_classes_of_isic_are_those_of_all_sites_unless_told_otherwise(tmp_path: Path) -> None:
    path = str(isic(tmp_path))
    placed = place_records(DataOptions(source="isic2019", path=path, held_out=("unknown",)), 0)
    assert placed.listing.classes == COMMON
    assert "left out: BCC (1), DF (0)" in "".join(placed.notes)
    assert {client for client, split in zip(placed.clients, placed.splits, strict=True) if split == "train"} == set(
        SITES
    )
    every = place_records(DataOptions(source="isic2019", path=path, common_classes=False), 0)
    assert "BCC" in every.listing.classes


def test_another_number_of_classes_than_the_papers_is_said(tmp_path: Path) -> None:
    truth = isic(tmp_path) / "ISIC_2019_Training_GroundTruth.csv"
    lines = truth.read_text().splitlines()
    truth.write_text("\n".join(line.replace("0.0,1.0,0.0", "1.0,0.0,0.0") if "NV_" in line else line for line in lines))
    assert (
        read_isic2019(tmp_path, Isic2019Options())
        .notes[-1]
        .startswith("classes that all 7 sites have (5; the paper has 6)")
    )


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("GroundTruth", "ISIC_bcc,0.0,0.0,1.0", "ISIC_bcc,0.0,1.0,1.0", r"GroundTruth.csv: row 254 .*found: NV, BCC"),
        ("GroundTruth", "ISIC_bcc,0.0,0.0,1.0", "ISIC_bcc,0.0,0.0,0.0", "ISIC_bcc.*found: none"),
        ("GroundTruth", "ISIC_bcc,", "ISIC_bbc,", "in one alone: ISIC_bbc, ISIC_bcc"),
        ("GroundTruth", "image,MEL", "image,MLE", "missing columns: MEL"),
        ("Metadata", "50,lateral torso", "50,left torso", "ISIC_lateral: 'left torso' is no site"),
        ("Metadata", "lesion_id", "lesion", "missing columns: lesion_id"),
    ],
)
def test_wrong_tables_of_isic_are_named(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    table = isic(tmp_path) / f"ISIC_2019_Training_{file}.csv"
    table.write_text(table.read_text().replace(old, new))
    with pytest.raises(InputError, match=message):
        read_isic2019(tmp_path, Isic2019Options())


def test_a_folder_without_the_tables_of_isic(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"GroundTruth.csv: no such file; .*Metadata.csv and ISIC_2019_Training_Input"):
        read_isic2019(tmp_path, Isic2019Options())


# ---- BraTS


def brats(folder: Path, suffix: str = ".nii.gz") -> Path:
    """Five patients of each grade; the tumour is in layers 3 to 6 of 9, and 3 shows little of it."""
    root = folder / "MICCAI_BraTS_2019_Data_Training"
    seg = np.zeros((8, 7, 9), np.int16)
    seg[2, 2, 3], seg[2:4, 2:4, 4], seg[2:5, 2:5, 5], seg[2:4, 2:4, 6] = 1, 2, 4, 2
    for number in range(10):
        grade, name = ("HGG", "LGG")[number % 2], f"BraTS19_P_{number}_1"
        for turn, kind in enumerate(("t1", "t1ce", "t2", "flair")):
            voxels = noise((8, 7, 9), 10 * number + turn).astype(np.int16)
            voxels[..., 0] = 0
            save_volume(root / grade / name / f"{name}_{kind}{suffix}", voxels)
        save_volume(root / grade / name / f"{name}_seg{suffix}", seg)
    return folder


def test_brats_by_modality(tmp_path: Path) -> None:
    found = read_brats(brats(tmp_path), SHARED, SliceOptions())
    assert found.classes == ("HGG", "LGG")
    assert found.sites == ("T1", "T1ce", "T2", "FLAIR")
    assert len(found.records) == 10 * 4 * 3
    assert found.records[0].name == "HGG/BraTS19_P_0_1/BraTS19_P_0_1_t1.nii.gz#axial[4]"
    assert {record.image.index for record in found.records} == {4, 5, 6}
    assert all(record.modality == record.site for record in found.records)
    assert found.notes[0] == "5 HGG and 5 LGG patients, 30 slices of their tumour, a modality a site"
    whole = read_brats(
        tmp_path / "MICCAI_BraTS_2019_Data_Training", SHARED, SliceOptions(inside="tissue", per_volume=4)
    )
    assert {record.image.index for record in whole.records} == {2, 4, 6, 8}


def test_a_patient_of_brats_is_in_one_split_at_all_sites(tmp_path: Path) -> None:
    placed = place_records(DataOptions(source="brats", path=str(brats(tmp_path))), 0)
    splits: dict[str, set[str]] = {}
    for record, split in zip(placed.listing.records, placed.splits, strict=True):
        splits.setdefault(record.group, set()).add(split)
    assert all(len(found) == 1 for found in splits.values())
    assert set.union(*splits.values()) >= {"train", "test"}


def test_disjoint_patients_of_brats_let_a_modality_be_held_out(tmp_path: Path) -> None:
    found = read_brats(brats(tmp_path, ".nii"), BratsOptions(patients="disjoint"), SliceOptions(per_volume=1))
    assert [record.site for record in found.records] == ["T1", "T1ce", "T2", "FLAIR", "T1"] * 2
    assert len({record.group for record in found.records}) == 10
    base: dict[str, Any] = {"source": "brats", "path": str(tmp_path), "held_out": ["FLAIR"]}
    placed = place_records(DataOptions.model_validate(base | {"brats": {"patients": "disjoint"}}), 0)
    assert placed.held_out == {"FLAIR"}
    with pytest.raises(InputError, match="train elsewhere"):
        place_records(DataOptions.model_validate(base), 0)


def test_what_is_missing_of_brats_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no folder HGG and no folder LGG; .*PATIENT_\{t1,t1ce,t2,flair,seg\}\.nii"):
        read_brats(tmp_path, SHARED, SliceOptions())
    root = brats(tmp_path) / "MICCAI_BraTS_2019_Data_Training"
    (root / "LGG" / "BraTS19_P_1_1" / "BraTS19_P_1_1_seg.nii.gz").unlink()
    with pytest.raises(InputError, match=r"1 volumes are missing: .*BraTS19_P_1_1_seg\.nii\.gz"):
        read_brats(tmp_path, SHARED, SliceOptions())
    assert len(read_brats(tmp_path, SHARED, SliceOptions(inside="tissue", per_volume=2)).records) == 80


def test_a_segmentation_lies_on_its_volume_whatever_its_header_says(tmp_path: Path) -> None:
    root = brats(tmp_path) / "MICCAI_BraTS_2019_Data_Training"
    file = root / "HGG" / "BraTS19_P_0_1" / "BraTS19_P_0_1_seg.nii.gz"
    save_volume(file, np.asarray(nibabel.load(file).dataobj), np.diag([1.0, 1.0, -1.0, 1.0]))
    found = read_brats(tmp_path, SHARED, SliceOptions())
    assert {record.image.index for record in found.records} == {4, 5, 6}


def test_slices_in_a_table(tmp_path: Path) -> None:
    save_volume(tmp_path / "v.nii.gz", noise((8, 8, 8), 0))
    rows = [f"v.nii.gz#axial[{i}],{'xy'[i % 2]},a,train,MRI" for i in range(4)]
    (tmp_path / "metadata.csv").write_text("\n".join(["image,label,site,split,modality", *rows]))
    federation = read_federation(DataOptions(path=str(tmp_path), image_size=8, test_fraction=0.0), 0)
    assert federation.client("a").train.images.shape == (4, 8, 8, 3)
    assert check_data(tmp_path).fit


# ---- RSNA ICH


def ich(folder: Path, dicom: bool = False) -> Path:
    """Six images of each subtype by three patients, one image with none, two with two, two rows twice, one no file."""
    singles = [(f"ID_{subtype[:6]}{i}", (subtype,)) for subtype in SUBTYPES for i in range(6)]
    others: list[tuple[str, tuple[str, ...]]] = [("ID_none", ()), ("ID_two", SUBTYPES[:2]), ("ID_gone", SUBTYPES[:1])]
    rows = [
        (f"{image}_{subtype}", int(subtype in found or (subtype == "any" and bool(found))))
        for image, found in [*singles, *others]
        for subtype in (*SUBTYPES, "any")
    ]
    folder.mkdir(exist_ok=True)
    with (folder / "stage_2_train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("ID", "Label"), *rows, *rows[:2]])
    (folder / "stage_2_train").mkdir()
    for number, (image, _) in enumerate([*singles, *others[:2]]):
        if dicom:
            pixels = noise((6, 6), number).astype(np.int16) + 950
            save_dicom(folder / "stage_2_train" / f"{image}.dcm", pixels, f"P{number // 2}")
        else:
            Image.fromarray(noise((6, 6), number)).save(folder / "stage_2_train" / f"{image}.png")
    return folder


def test_slices_with_one_subtype(tmp_path: Path) -> None:
    found = read_rsna_ich(ich(tmp_path))
    assert found.classes == SUBTYPES
    assert [record.label for record in found.records] == [subtype for subtype in SUBTYPES for _ in range(6)]
    assert found.notes[:2] == (
        "30 images with one subtype used; left out: 1 with none, 1 with several",
        "1 of 33 images of stage_2_train.csv have no file",
    )
    assert "leakage is possible: 30 of 30 images" in found.notes[2]
    (tmp_path / "patients.csv").write_text("image,patient\nID_epidur0.dcm,P1\nstage_2_train/ID_epidur1.png,P1\n")
    grouped = read_rsna_ich(tmp_path)
    assert [record.group for record in grouped.records[:3]] == ["P1", "P1", ""]
    assert "28 of 30 images" in grouped.notes[2]


def test_patients_from_dicom_headers(tmp_path: Path) -> None:
    found = read_rsna_ich(ich(tmp_path, dicom=True))
    assert str(found.records[0].image).endswith("ID_epidur0.dcm#brain[0]")
    assert [record.group for record in found.records[:4]] == ["P0", "P0", "P1", "P1"]
    assert not any("leakage" in note for note in found.notes)
    (tmp_path / "stage_2_train" / "ID_epidur0.dcm").write_bytes(b"cut short")
    again = read_rsna_ich(tmp_path)
    assert [record.group for record in again.records[:2]] == ["", "P0"]
    assert "damaged" in check_data(tmp_path).of("error")[0].message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ID,Label", "id,Label", "columns must be ID, Label"),
        ("ID_none_subdural,0", "ID_none_cranial,0", "row 186: expected"),
        ("ID_none_subdural,0", "ID_none_subdural,2", "row 186: expected"),
        ("ID_none_subdural,0", "ID_none_epidural,1", "row 186: ID_none_epidural has another label"),
        ("ID_none_subdural,0\r\n", "", "images without a row for each .*: ID_none"),
    ],
)
def test_wrong_rows_of_the_labels_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    table = ich(tmp_path) / "stage_2_train.csv"
    text = table.read_bytes().decode()
    assert text.count(old) == 1
    table.write_bytes(text.replace(old, new).encode())
    with pytest.raises(InputError, match=message):
        read_rsna_ich(tmp_path)


def test_what_is_missing_of_rsna_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"stage_2_train\.csv: no such file"):
        read_rsna_ich(tmp_path)
    ich(tmp_path)
    for file in (tmp_path / "stage_2_train").iterdir():
        file.unlink()
    with pytest.raises(InputError, match=r"no images ID_\*"):
        read_rsna_ich(tmp_path)


# ---- bladder MRI


def bladder(folder: Path) -> Path:
    """The published layout: six patients a centre, the first with two contours."""
    for centre in (1, 2, 3, 4):
        rows = [(number % 2, f"{number:03d}.nii.gz", f"{number:03d}.nii.gz") for number in range(6)]
        rows += [(0, "000.nii.gz", "000_2.nii.gz")]
        root = folder / f"Center{centre}"
        for number, (_, image, mask) in enumerate(rows):
            contour = np.zeros((6, 6, 5), np.uint8)
            contour[1:3, 1:3, 2 + (number == 6)] = 1
            save_volume(root / "Annotation" / mask, contour)
            save_volume(root / "T2WI" / image, noise((6, 6, 5), 10 * centre + number).astype(np.int16))
        with (root / f"Center{centre}_label.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("label", "image_name", "mask_name"), *rows])
    return folder


def test_bladder_volumes_by_centre(tmp_path: Path) -> None:
    found = read_bladder_mri(bladder(tmp_path), SliceOptions())
    assert found.classes == ("NMIBC", "MIBC")
    assert found.sites == ("Center_1", "Center_2", "Center_3", "Center_4")
    ours = [record for record in found.records if record.site == "Center_2"]
    assert [record.name.rpartition("/")[2] for record in ours] == [
        *(f"{number:03d}.nii.gz#axial[2]" for number in range(6)),
        "000.nii.gz#axial[3]",
    ]
    assert [record.group for record in ours if record.image.index == 3] == ["Center_2/000"]
    assert found.notes == ("24 patients, 28 slices of their tumour",)


def test_slices_with_tumours_of_both_classes_are_left_out(tmp_path: Path) -> None:
    table = bladder(tmp_path) / "Center3" / "Center3_label.csv"
    table.write_text(table.read_text().replace("0,000.nii.gz,000_2", "1,000.nii.gz,000_2"))
    save_volume(tmp_path / "Center3" / "Annotation" / "000_2.nii.gz", np.ones((6, 6, 5), np.uint8))
    found = read_bladder_mri(tmp_path, SliceOptions())
    assert found.notes == (
        "24 patients, 30 slices of their tumour",
        "1 slices left out: they show tumours of both classes",
    )


def test_flat_bladder_images_by_centre(tmp_path: Path) -> None:
    for number, name in enumerate(
        ("Center_1/MIBC/001_1", "Center_1/NMIBC/002_1", "Center3/MIBC/001_1", "Global/MIBC/9")
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise((6, 6), number)).save(tmp_path / f"{name}.png")
    (tmp_path / "patients.csv").write_text("image,patient\n001_1,1\nCenter_1/NMIBC/002_1.png,2\n")
    found = read_bladder_mri(tmp_path, SliceOptions())
    assert sorted((record.site, record.label, record.group) for record in found.records) == [
        ("Center_1", "MIBC", "Center_1/1"),
        ("Center_1", "NMIBC", "Center_1/2"),
        ("Center_3", "MIBC", "Center_3/1"),
    ]
    assert "folders that are no centre left out: Global" in found.notes
    assert found.notes[-1] == "centres that are not there: Center_2, Center_4"
    (tmp_path / "patients.csv").unlink()
    assert any(
        "3 of 3 images have no known patient" in note for note in read_bladder_mri(tmp_path, SliceOptions()).notes
    )


def wrong_label(folder: Path) -> None:
    file = folder / "Center2" / "Center2_label.csv"
    file.write_text(file.read_text().replace("1,001.nii.gz", "2,001.nii.gz"))


def no_table(folder: Path) -> None:
    (folder / "Center2" / "Center2_label.csv").rename(folder / "Center2" / "Center2_label.xlsx")


def no_mask(folder: Path) -> None:
    (folder / "Center2" / "Annotation" / "003.nii.gz").unlink()


def twice(folder: Path) -> None:
    (folder / "Center_2").mkdir()


def both_layouts(folder: Path) -> None:
    (folder / "Center2" / "T2WI").rename(folder / "Center2" / "MIBC")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrong_label, "row 3: label '2' is neither 0 nor 1"),
        (no_table, r"save Center2_label\.xlsx of the data set as CSV"),
        (no_mask, r"1 volumes are missing: .*003\.nii\.gz"),
        (twice, "one folder a centre.*found: .*Center2.*Center_2"),
        (both_layouts, r"Center_1, Center_3, Center_4 hold volumes \(T2WI\), Center_2 do not"),
    ],
)
def test_wrong_bladder_folders_are_named(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(bladder(tmp_path))
    with pytest.raises(InputError, match=message):
        read_bladder_mri(tmp_path, SliceOptions())


def test_a_folder_without_centres_or_classes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found: none"):
        read_bladder_mri(tmp_path, SliceOptions())
    (tmp_path / "Center_1" / "MIBC").mkdir(parents=True)
    Image.fromarray(noise((6, 6), 0)).save(tmp_path / "Center_1" / "MIBC" / "1.png")
    with pytest.raises(InputError, match="two class folders in all; found: MIBC"):
        read_bladder_mri(tmp_path, SliceOptions())


# ---- the examples

MADE: dict[str, tuple[Callable[[Path], Path], Sequence[str], Sequence[str]]] = {
    "isic2019_sites": (isic, SITES, ("unknown",)),
    "brats_modalities": (brats, ("T1", "T1ce", "T2", "FLAIR"), ()),
    "rsna_ich": (ich, ("client-0", "client-1", "client-2", "client-3"), ("held-out",)),
    "bladder_mri": (bladder, ("Center_2", "Center_3", "Center_4"), ("Center_1",)),
}


def example(name: str, folder: Path) -> Experiment:
    """An experiment of examples/ on made-up images, small ones."""
    given = experiment_from(tomllib.loads((EXAMPLES / f"{name}.toml").read_text()), name)
    changes = {"data.path": str(folder), "data.image_size": 32, "rounds": 1, "training.device": "cpu"}
    fixed = {"training.memory_format": "contiguous", "training.depthwise": "library", "transport.workers": 1}
    return given.changed(changes | fixed, name)


@pytest.mark.parametrize("name", MADE)
def test_an_example_reads_its_layout(tmp_path: Path, name: str) -> None:
    make, clients, held_out = MADE[name]
    experiment = example(name, make(tmp_path))
    federation: Federation = read_federation(experiment.data, 0)
    assert federation.names == tuple(clients)
    assert tuple(site.name for site in federation.held_out) == tuple(held_out)
    assert set(experiment.text.names) == set(federation.classes)
    assert all(len(client.train) for client in federation.clients)
    assert sum(len(client.test) for client in federation.clients) > 0
    assert guess_options(tmp_path).source == experiment.data.source
    report = check_data(tmp_path, experiment.data)
    assert report.fit, report.render()
    assert report.classes == federation.classes


@pytest.mark.parametrize("name", MADE)
def test_an_example_runs(tmp_path: Path, name: str) -> None:
    """From the layout to figures, with a small network in place of the encoder."""
    make, clients, _ = MADE[name]
    small = {"model.backbone": "wardround:resnet4-lib", "model.pretrained": False, "model.finetune_blocks": 1}
    method = {"method.name": "fedavg", "data.image_size": 16}
    results = run(example(name, make(tmp_path / "data")).changed(small | method, name), tmp_path / "out")
    assert set(results["clients"]) == set(clients)


def test_body_sites_of_a_real_table(shared: Path) -> None:
    """HAM10000 by localisation: seven sites of 400 images or more, and the six classes that they share."""
    given = experiment_from(tomllib.loads((EXAMPLES / "ham10000_body_sites.toml").read_text()), "example").data
    placed = place_records(given.model_copy(update={"path": str(shared / "ham10000_sites")}), 0)
    assert set(placed.clients) == {"abdomen", "back", "chest", "face", "lower extremity", "trunk", "upper extremity"}
    assert placed.listing.classes == ("akiec", "bcc", "bkl", "mel", "nv", "vasc")
    assert "acral (7), ear (56), foot (319)" in "".join(placed.notes)
    assert "left out: df (112)" in "".join(placed.notes)
