"""The `[data]` section of an experiment file."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from wardround.data.benchmark_options import BratsOptions, Isic2019Options, MimhOptions, SliceOptions
from wardround.data.images import Decoding, Resize
from wardround.data.phantoms.options import PhantomOptions
from wardround.data.transforms import STORED_OVER_CROP, Policy
from wardround.options import Options

Source = Literal[
    "table", "folders", "medmnist", "mimh", "fed-isic", "isic2019", "brats", "rsna-ich", "bladder-mri", "phantoms"
]  # fmt: skip
PartitionKind = Literal["site", "column", "modality", "dirichlet", "dirichlet-hsu", "quantity"]


class ColumnNames(Options):
    """Which column of a table says what. A name that is given must exist; a default may be absent."""

    image: str = Field(
        "image", description="column with the image's path, FILE.npz#ARRAY[INDEX] or FILE.nii.gz#axial[INDEX]"
    )
    label: str = Field("label", description="column with the class")
    site: str | None = Field(None, description="column with the hospital; default: `site` where there is one")
    split: str | None = Field(None, description="column with train, val or test; default: `split`")
    group: str | None = Field(
        None,
        description="column with the patient or lesion; default: the first of group, patient_id, lesion_id",
    )
    modality: str | None = Field(None, description="column with the modality; default: `modality`")


class PartitionOptions(Options):
    """Which images make up a client."""

    kind: PartitionKind = Field(
        "site",
        description="site: one client a site; column, modality: one client a value of that column;"
        " dirichlet: every class is dealt to the clients in Dirichlet(alpha) shares;"
        " dirichlet-hsu: a client draws its class mixture from Dirichlet(alpha x class prior), equal sizes;"
        " quantity: sizes in Dirichlet(alpha) shares, classes alike",
    )
    clients: int = Field(4, ge=1, description="number of clients (dirichlet, dirichlet-hsu, quantity)")
    alpha: float = Field(0.5, gt=0, description="Dirichlet concentration: the smaller, the more the clients differ")
    column: str | None = Field(None, description='the column of kind = "column"')
    min_size: int = Field(1, ge=0, description="redraw until every client has this many training images")
    min_test_size: int = Field(
        0, ge=0, description="and this many test images; the source must say which images are for testing"
    )

    @model_validator(mode="after")
    def _column_is_named(self) -> Self:
        if (self.kind == "column") != (self.column is not None):
            raise ValueError('partition.column goes with partition.kind = "column", and only with it')
        return self


class DataOptions(Options):
    """Where the images come from, how they become arrays, and which client and split each belongs to."""

    source: Source = Field("table", description="kind of source")
    path: str | None = Field(
        None,
        description="table: the CSV file or the folder of metadata.csv; folders: that of site/class/image;"
        " medmnist: an .npz file or the folder of it; mimh: the folder of the .npz files; fed-isic: FLamby's folder"
        " or a table; isic2019, brats, rsna-ich, bladder-mri: the folder that the published files are in",
    )
    image_size: int = Field(128, ge=8, description="side of the square images that a model sees (pixels)")
    channels: Literal[1, 3] = Field(3, description="3: colour, grey repeated thrice; 1: grey")
    resize: Resize = Field(
        "crop",
        description="crop: shorter side to size, centre crop; squash: both sides; pad: longer side, black",
    )
    colour_constancy: bool = Field(
        False, description="shades-of-grey colour constancy, power 6, as FLamby applies to raw ISIC images"
    )
    augment: Policy = Field("none", description="augmentation of training images")
    max_train_per_client: int | None = Field(None, ge=1, description="cap on training images, stratified and seeded")
    max_test_per_client: int | None = Field(None, ge=1, description="cap on test images, stratified and seeded")
    on_bad_image: Literal["error", "skip"] = Field("error", description="what to do with an image that is not readable")
    columns: ColumnNames = Field(default_factory=ColumnNames, description="names of the table's columns")
    sites: tuple[str, ...] | None = Field(None, description="keep only these sites")
    min_site_images: int | None = Field(None, ge=1, description="keep only sites with at least this many images")
    common_classes: bool | None = Field(
        None,
        description="keep only classes that every kept site has at least one training image of; default: isic2019"
        " does, others do not",
    )
    partition: PartitionOptions = Field(default_factory=PartitionOptions, description="which images make a client")
    held_out: tuple[str, ...] = Field(
        (),
        description="sites (of partition column or modality: its values) that never train; all their images test what"
        " is shared, alone",
    )
    held_out_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="instead of whole sites: this share of all images, groups whole, the same for every partition",
    )
    split: Literal["column", "group", "official", "lesion"] | None = Field(
        None,
        description="column: as the source says (default where it does); group: drawn afresh, groups whole;"
        " fed-isic: official (FLamby's fold, default) or lesion (drawn afresh, lesions whole)",
    )
    val_fraction: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="validation share where the source has none; default: 0.1 if drawn afresh, else 0",
    )
    test_fraction: float = Field(0.2, ge=0, lt=1, description="test share where the source has none")
    flag: str | None = Field(None, description="medmnist: which set, such as pneumoniamnist")
    size: Literal[28, 64, 128, 224] = Field(28, description="medmnist, mimh: side of the stored images (pixels)")
    fold_file: str | None = Field(
        None, description="fed-isic: FLamby's file train_test_split, where it is not in `path`"
    )
    mimh: MimhOptions = Field(default_factory=MimhOptions, description="mimh: which sets, and how many images")
    isic2019: Isic2019Options = Field(default_factory=Isic2019Options, description="isic2019: which images")
    brats: BratsOptions = Field(default_factory=BratsOptions, description="brats: which patients at which site")
    slices: SliceOptions = Field(default_factory=SliceOptions, description="brats, bladder-mri: which slices")
    phantoms: PhantomOptions = Field(default_factory=PhantomOptions, description="phantoms: which and how skewed")

    @property
    def stored_size(self) -> int:
        """Side of the decoded images in pixels: the random crop of `augment = "fed-isic"` needs a margin."""
        return math.ceil(self.image_size * STORED_OVER_CROP) if self.augment == "fed-isic" else self.image_size

    @property
    def decoding(self) -> Decoding:
        """How an image file becomes an array under these options."""
        return Decoding(self.stored_size, self.channels, self.resize, self.colour_constancy)

    @model_validator(mode="after")
    def _source_has_what_it_needs(self) -> Self:
        if self.path is None and self.source not in ("medmnist", "mimh", "phantoms"):
            raise ValueError(f'source = "{self.source}" needs data.path')
        if self.source == "medmnist" and self.flag is None and not (self.path or "").endswith(".npz"):
            raise ValueError('source = "medmnist" needs data.flag, or data.path to an .npz file')
        return self

    @model_validator(mode="after")
    def _held_out_is_said_once(self) -> Self:
        if self.held_out and self.held_out_share:
            raise ValueError("held_out names sites, held_out_share draws images: give one of them")
        if self.held_out_share and self.source == "phantoms":
            raise ValueError("phantoms make their own sites: name some of them in held_out")
        return self

    @model_validator(mode="after")
    def _split_fits_the_source(self) -> Self:
        if self.split in ("official", "lesion") and self.source != "fed-isic":
            raise ValueError(f'split = "{self.split}" is for source = "fed-isic"; allowed here: column, group')
        if (self.val_fraction or 0.0) + self.test_fraction >= 1:
            raise ValueError("val_fraction + test_fraction must leave something to train on")
        if self.source == "phantoms" and (self.min_site_images is not None or self.common_classes):
            raise ValueError(
                "phantoms make their own sites, which min_site_images and common_classes do not choose from"
            )
        if self.source == "phantoms" and self.partition.kind == "column":
            raise ValueError('phantoms have no columns: partition.kind = "column" does not go with them')
        return self
