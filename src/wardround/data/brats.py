"""BraTS 2019 slices by modality: high- and low-grade glioma, one site a modality.

335 patients, 259 of high grade (HGG) and 76 of low grade (LGG), each with four co-registered, skull-stripped volumes
of 240 x 240 x 155 voxels and a segmentation of the tumour (Menze et al., IEEE TMI 34:1993, 2015; Bakas et al., Sci.
Data 4:170117, 2017).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wardround.data.benchmark_options import BratsOptions, SliceOptions
from wardround.data.records import ImageRef, Listing, Record, some
from wardround.data.slice_choice import PLANE, choose_slices
from wardround.data.volumes import VOLUME_SUFFIXES
from wardround.errors import InputError

GRADES = ("HGG", "LGG")
MODALITIES = {"T1": "t1", "T1ce": "t1ce", "T2": "t2", "FLAIR": "flair"}  # site, and how its files end
SEGMENTATION = "seg"
ROOT = "MICCAI_BraTS_2019_Data_Training"


@dataclass(frozen=True)
class Patient:
    """One patient's folder.

    Attributes:
        folder: where the volumes lie.
        grade: HGG or LGG.
        volumes: the volume of every modality that is used.
        shown: the file that says which slices count.
    """

    folder: Path
    grade: str
    volumes: dict[str, Path]
    shown: Path


def read_brats(path: Path, options: BratsOptions, slices: SliceOptions) -> Listing:
    """The slices of the layout `{HGG,LGG}/PATIENT/PATIENT_{t1,t1ce,t2,flair,seg}.nii.gz` (or `.nii`).

    A patient has the same slices in all modalities, and is a group. Notes count patients and slices.

    Args:
        path: the folder of HGG and LGG, or the one that holds `ROOT`.
        options: whether a patient is at every site.
        slices: which slices are images.

    Raises:
        InputError: a folder or a file is missing, a volume is damaged, or no slice shows what it must.
    """
    patients = _patients(_root(path), options, slices)
    pairs = [(patient.shown, next(iter(patient.volumes.values()))) for patient in patients]
    chosen = choose_slices(pairs, slices)
    records = tuple(
        record for patient, rows in zip(patients, chosen, strict=True) for record in _records(patient, rows)
    )
    if not records:
        raise InputError(f"{path}: no slice of any volume shows any {slices.inside}")
    return Listing(records, str(path), GRADES, _notes(patients, chosen, slices), tuple(MODALITIES))


def _root(path: Path) -> Path:
    """The folder of HGG and LGG; archives unpack to one or two folders `ROOT` around it."""
    root = path
    while (root / ROOT).is_dir():
        root = root / ROOT
    missing = [grade for grade in GRADES if not (root / grade).is_dir()]
    if missing:
        raise InputError(
            f"{root}: no folder {' and no folder '.join(missing)}; the layout of BraTS 2019 is"
            f" {ROOT}/{{HGG,LGG}}/PATIENT/PATIENT_{{{','.join(MODALITIES.values())},{SEGMENTATION}}}.nii.gz"
        )
    return root


def _patients(root: Path, options: BratsOptions, slices: SliceOptions) -> list[Patient]:
    """Every patient by grade and name; InputError naming the files that are missing."""
    found: list[Patient] = []
    missing: list[str] = []
    for grade in GRADES:
        folders = sorted(item for item in (root / grade).iterdir() if item.is_dir() and not item.name.startswith("."))
        for turn, folder in enumerate(folders):
            sites = list(MODALITIES)
            used = sites if options.patients == "shared" else [sites[turn % len(sites)]]
            volumes = {site: _file(folder, MODALITIES[site]) for site in used}
            shown = _file(folder, SEGMENTATION) if slices.inside == "tumour" else volumes[used[0]]
            missing += [str(file) for file in dict.fromkeys((*volumes.values(), shown)) if not file.is_file()]
            found.append(Patient(folder, grade, volumes, shown))
    if missing:
        raise InputError(f"{root}: {len(missing)} volumes are missing: {some(missing)}")
    return found


def _file(folder: Path, kind: str) -> Path:
    """A patient's volume of one kind: `.nii` where there is one, else `.nii.gz`, which may be missing."""
    plain, packed = (folder / f"{folder.name}_{kind}{suffix}" for suffix in VOLUME_SUFFIXES)
    return plain if plain.is_file() else packed


def _records(patient: Patient, rows: Sequence[int]) -> Iterator[Record]:
    for site, file in patient.volumes.items():
        for row in rows:
            name = f"{patient.grade}/{patient.folder.name}/{file.name}#{PLANE}[{row}]"
            ref = ImageRef(file, PLANE, row)
            yield Record(ref, name, patient.grade, site, group=patient.folder.name, modality=site)


def _notes(patients: Sequence[Patient], chosen: Sequence[Sequence[int]], slices: SliceOptions) -> tuple[str, ...]:
    grades = [patient.grade for patient in patients]
    counts = " and ".join(f"{grades.count(grade)} {grade}" for grade in GRADES)
    fewer = [p.folder.name for p, rows in zip(patients, chosen, strict=True) if len(rows) < slices.per_volume]
    notes = [f"{counts} patients, {sum(map(len, chosen))} slices of their {slices.inside}, a modality a site"]
    notes += [f"patients with fewer than {slices.per_volume} slices ({len(fewer)}): {some(fewer)}"] if fewer else []
    return tuple(notes)
