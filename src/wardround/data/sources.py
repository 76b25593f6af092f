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
