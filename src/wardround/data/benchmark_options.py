"""Keys of the sources that read benchmarks by name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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
