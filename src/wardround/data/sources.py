"""Data sets that Wardround reads by name or form, where to get them, and on what terms."""

from __future__ import annotations

from dataclasses import dataclass

from wardround.data.medmnist import SIZES, medmnist_info


@dataclass(frozen=True)
class DatasetInfo:
    """One entry of `wardround datasets`.

    Attributes:
        name: its name here.
        what: what it holds.
        citation: what to cite.
        licence: the terms of the images; empty where they are the user's own.
        get: how to get it.
        config: a `[data]` section that reads it.
    """

    name: str
    what: str
    citation: str
    licence: str
    get: str
    config: str


_MEDMNIST_CITATION = "Yang et al., MedMNIST v2, Scientific Data 10:41 (2023), doi:10.1038/s41597-022-01721-8"

DATASETS: tuple[DatasetInfo, ...] = (
    DatasetInfo(
        "table",
        "your own images: a CSV file with image, label, site and, if you have them, split, group, modality",
        "",
        "",
        "write metadata.csv beside the images; `wardround check-data` says what is wrong with it",
        '[data]\nsource = "table"\npath = "folder/of/metadata.csv"',
    ),
    DatasetInfo(
        "folders",
        "your own images in folders site/class/image or site/split/class/image",
        "",
        "",
        "sort the files into folders; `wardround check-data` says what is wrong with them",
        '[data]\nsource = "folders"\npath = "folder"',
    ),
    DatasetInfo(
        "fed-isic",
        "FedISIC: 23,247 dermoscopic images, 8 classes, 6 centres; FLamby's fold or a lesion-grouped split",
        "Ogier du Terrail et al., FLamby, NeurIPS 2022 Datasets and Benchmarks; ISIC 2019: Tschandl et al., "
        "Scientific Data 5:180161 (2018), Codella et al., arXiv:1710.05006, Combalia et al., arXiv:1908.02288",
        "CC BY-NC 4.0",
        "run FLamby's download and resize scripts, then put its train_test_split (and HAM10000_metadata for "
        "lesions) into the folder",
        '[data]\nsource = "fed-isic"\npath = "fed_isic2019"\nimage_size = 200\naugment = "fed-isic"\n'
        'split = "official"  # or "lesion"',
    ),
    DatasetInfo(
        "isic2019",
        "ISIC 2019 by anatomic site: 25,331 dermoscopic images, six sites and those of unknown site, the classes that"
        " all seven have (MEL, NV, AK, BKL, VASC, SCC)",
        "Tschandl et al., Scientific Data 5:180161 (2018); Codella et al., arXiv:1710.05006; Combalia et al.,"
        " arXiv:1908.02288; by site: FedMedCLIP (2025)",
        "CC BY-NC 4.0",
        "ISIC_2019_Training_Input, _GroundTruth.csv and _Metadata.csv of challenge.isic-archive.com in one folder",
        '[data]\nsource = "isic2019"\npath = "ISIC_2019"\nheld_out = ["unknown"]',
    ),
    DatasetInfo(
        "brats",
        "BraTS 2019: MRI of 259 high-grade and 76 low-grade gliomas, axial slices, one site a modality",
        "Menze et al., IEEE TMI 34:1993 (2015); Bakas et al., Scientific Data 4:170117 (2017); Bakas et al.,"
        " arXiv:1811.02629",
        "on registration with the organisers",
        "unpack MICCAI_BraTS_2019_Data_Training; needs the extra wardround[nifti]",
        '[data]\nsource = "brats"\npath = "MICCAI_BraTS_2019_Data_Training"\n\n'
        '[data.slices]\nper_volume = 16\ninside = "tumour"',
    ),
    DatasetInfo(
        "rsna-ich",
        "RSNA 2019 head CT: slices with exactly one of five subtypes of haemorrhage; no sites",
        "Flanders et al., Radiology: Artificial Intelligence 2:e190211 (2020)",
        "non-commercial and academic research, as the RSNA says",
        "stage_2_train.csv and the folder stage_2_train (DICOM, extra wardround[dicom], or PNG) in one folder",
        '[data]\nsource = "rsna-ich"\npath = "rsna-ich"\n\n'
        '[data.partition]\nkind = "dirichlet"\nclients = 4\nalpha = 0.5',
    ),
    DatasetInfo(
        "bladder-mri",
        "FedBCa: 275 bladder MRI volumes from four centres, muscle-invasive cancer or not, axial slices",
        "Cao et al., Scientific Data 11:1147 (2024)",
        "as Zenodo record 13622759 says",
        "unpack it, save every Center1_label.xlsx as CSV; needs the extra wardround[nifti]",
        '[data]\nsource = "bladder-mri"\npath = "FedBCa"\nheld_out = ["Center_1"]',
    ),
    DatasetInfo(
        "mimh",
        "MIMH: RetinaMNIST, BloodMNIST, TissueMNIST, PathMNIST and DermaMNIST in one federation, a modality each, 37"
        " classes in all; a set a client, or dealt in Dirichlet shares",
        f"{_MEDMNIST_CITATION}; as one benchmark: FM² (2026)",
        "CC BY 4.0, DermaMNIST CC BY-NC 4.0",
        "as the single sets: all files in one folder, or downloaded with the extra wardround[medmnist]",
        '[data]\nsource = "mimh"\npath = "medmnist"\nsize = 224\n\n'
        '[data.partition]\nkind = "dirichlet"\nclients = 10\nalpha = 0.3\nmin_size = 64\nmin_test_size = 16',
    ),
    DatasetInfo(
        "phantoms",
        "images made on the spot, offline: five modality families, four dials of skew between sites",
        "",
        "",
        "nothing to get",
        '[data]\nsource = "phantoms"\n\n[data.phantoms]\nfamily = "dermoscopy"\nfeature_skew = 1.0',
    ),
)


def medmnist_datasets() -> tuple[DatasetInfo, ...]:
    """One entry for every MedMNIST set that can be used here: flat images with one label each.

    MissingExtra where the package `medmnist` is not installed.
    """
    return tuple(
        _medmnist_entry(flag, info)
        for flag, info in medmnist_info().items()
        if not flag.endswith("3d") and not str(info["task"]).startswith("multi-label")
    )


def _medmnist_entry(flag: str, info: dict[str, object]) -> DatasetInfo:
    labels, counts = info["label"], info["n_samples"]
    assert isinstance(labels, dict)
    assert isinstance(counts, dict)
    images = ", ".join(f"{split} {count}" for split, count in counts.items())
    sizes = ", ".join(map(str, SIZES))
    return DatasetInfo(
        flag,
        f"{len(labels)} classes; {images}; stored at {sizes} pixels; no sites",
        _MEDMNIST_CITATION,
        str(info["license"]),
        f"downloaded on first use with the extra wardround[medmnist], or place {flag}_SIZE.npz ({flag}.npz for"
        " 28 pixels) in a folder and set data.path to it",
        f'[data]\nsource = "medmnist"\nflag = "{flag}"\nsize = 64\n\n'
        '[data.partition]\nkind = "dirichlet"\nclients = 4\nalpha = 0.5',
    )


def all_datasets() -> tuple[DatasetInfo, ...]:
    """`DATASETS`, and the MedMNIST sets where their package is installed."""
    from wardround.errors import MissingExtra

    try:
        return DATASETS + medmnist_datasets()
    except MissingExtra:
        return DATASETS
