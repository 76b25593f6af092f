"""A patient with images of several modalities is on one side of a later transfer: trained on, or tested."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wardround.data import ClientData
from wardround.data.options import DataOptions
from wardround.data.read import read_federation
from wardround.unseen import few_images, without_modality

KINDS, PATIENTS = ("ct", "mri", "xray"), 24


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Every patient once in each modality, of one of two classes; splits are ours to draw."""
    rows = ["image,label,site,modality,patient_id"]
    for patient in range(PATIENTS):
        for level, kind in enumerate(KINDS):
            name = f"{kind}-{patient}.png"
            Image.fromarray(np.full((8, 8, 3), 10 * level + patient, np.uint8)).save(tmp_path / name)
            rows.append(f"{name},{'ab'[patient % 2]},{kind},{kind},p{patient}")
    (tmp_path / "metadata.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def patients(*sites: ClientData, split: str) -> set[str]:
    """Those whose images are in a split; the names of images end in theirs."""
    parts = [site.test if split == "test" else site.train for site in sites]
    return {Path(name).stem.split("-")[1] for part in parts for name in part.names}


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_on_both_sides(table: Path, kind: str) -> None:
    data = DataOptions(source="table", path=str(table), image_size=8, test_fraction=0.3)
    whole = read_federation(data, 0)
    left, few = without_modality(whole, kind), few_images(whole, kind, 0.5, 0)
    tested = patients(few.client, split="test")
    seen = patients(*left.clients, split="train")
    assert left.modalities == tuple(other for other in KINDS if other != kind)
    assert patients(few.client, split="train") & seen, "patients come again, or this test shows nothing"
    assert tested
    assert not tested & (patients(few.client, split="train") | seen)
