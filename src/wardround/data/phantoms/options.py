"""What a phantom federation is: its family of images, its sizes and the four dials between its sites."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wardround.options import Options

FamilyName = Literal["dermoscopy", "fundus", "xray", "histology", "blood", "mixed"]


class PhantomOptions(Options):
    """Images made on the spot. At 0 a dial leaves all sites identically distributed; at 1 they differ strongly."""

    family: FamilyName = Field(
        "dermoscopy",
        description="the images: dermoscopy, fundus, xray, histology or blood (smears); mixed gives each site one"
        " family in turn, and the label space is then the union of the families' classes",
    )
    clients: int = Field(4, ge=1, description="number of sites")
    classes: int = Field(4, ge=2, le=8, description="classes of a family: its first ones")
    train_per_client: int = Field(200, ge=1, description="training images of a site, on average over the sites")
    val_per_client: int = Field(40, ge=0, description="validation images of a site, on average over the sites")
    test_per_client: int = Field(100, ge=0, description="test images of every site, whatever quantity_skew is")
    feature_skew: float = Field(
        0.0,
        ge=0,
        le=1,
        description="how far the sites' scanners differ: colour, tone, sharpness, noise, vignette",
    )
    label_skew: float = Field(
        0.0,
        ge=0,
        le=1,
        description="how far each site's classes are from uniform; all splits follow the site's own",
    )
    quantity_skew: float = Field(
        0.0,
        ge=0,
        le=1,
        description="how unequal the sites' train and val sizes are; their total stays the same",
    )
    concept_skew: float = Field(
        0.0, ge=0, le=1, description="share of the class pairs whose two labels every second site exchanges"
    )
    difficulty: float = Field(
        0.75,
        ge=0,
        le=1,
        description="how faint the structures of a class are and how much of others is beside them",
    )
