"""Keys of the sources that read benchmarks by name."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from wardround.options import Options


class Isic2019Options(Options):
    """The `[data.isic2019]` section."""

    without_lesion: Literal["keep", "drop"] = Field(
        "keep",
        description="images whose lesion is not recorded (2,084): keep: each is a group of its own;"
        " drop: leave them out, as FLamby does",
    )


class BratsOptions(Options):
    """The `[data.brats]` section."""

    patients: Literal["shared", "disjoint"] = Field(
        "shared",
        description="shared: every patient is at all four modalities' sites, in the same split at each;"
        " disjoint: every patient gives one modality alone, in turn by name, so that a modality can be held out",
    )


MimhSet = Literal[
    "retinamnist", "bloodmnist", "tissuemnist", "pathmnist", "dermamnist", "pneumoniamnist", "octmnist", "organamnist",
    "organcmnist", "organsmnist", "breastmnist",
]  # fmt: skip
MIMH_SETS: tuple[MimhSet, ...] = ("retinamnist", "bloodmnist", "tissuemnist", "pathmnist", "dermamnist")


class MimhOptions(Options):
    """The `[data.mimh]` section."""

    sets: tuple[MimhSet, ...] = Field(
        MIMH_SETS,
        min_length=1,
        description="MedMNIST sets, each of a modality of its own; the benchmark's five, or octmnist, pneumoniamnist,"
        " breastmnist, organamnist, organcmnist, organsmnist",
    )
    domains: int | None = Field(
        None, ge=1, description="use the first so many of `sets`: 5, 4 or 3 in the benchmark; none: all"
    )
    label_space: Literal["union", "shared"] = Field(
        "union",
        description="union: a class for each class of a set, 37 of the benchmark's five whichever are used; shared:"
        " class k of every set is one class, 9 in all, to show how much colliding labels cost",
    )
    cap_per_dataset: int | None = Field(
        None, ge=1, description="cap on the training images of a set, stratified and seeded, before they are dealt"
    )
    cap_test_per_dataset: int | None = Field(
        None, ge=1, description="the same for the validation images of a set, and for its test images"
    )
    check: bool = Field(True, description="a file must have the checksum (MD5) that the package medmnist lists")

    @property
    def used(self) -> tuple[MimhSet, ...]:
        """The sets that take part, in their order."""
        return self.sets[: self.domains]

    @model_validator(mode="after")
    def _sets_are_there_once(self) -> Self:
        if len(set(self.sets)) != len(self.sets):
            raise ValueError(f"sets names a set twice: {', '.join(self.sets)}")
        if self.domains is not None and self.domains > len(self.sets):
            raise ValueError(f"domains = {self.domains}, but there are {len(self.sets)} sets: {', '.join(self.sets)}")
        return self


class SliceOptions(Options):
    """The `[data.slices]` section: which axial slices of a volume are images."""

    inside: Literal["tumour", "tissue"] = Field(
        "tumour",
        description="what a slice must show: tumour (the segmentation marks it) or tissue (voxels that are not 0)",
    )
    min_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="a slice counts that shows at least this share of what the volume's fullest slice shows",
    )
    per_volume: int = Field(
        16,
        ge=1,
        description="slices of a volume, evenly spaced among those that count; all of them where they are fewer",
    )
