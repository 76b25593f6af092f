"""Real medical images, where they are at hand."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest

from wardround.data.cache import DecodedCache, decoded_cache
from wardround.data.checking import check_data
from wardround.data.federation import SPLITS, Federation
from wardround.data.options import DataOptions
from wardround.data.read import place_records, read_federation
from wardround.errors import InputError

SHARED = Path(__file__).parents[2] / "shared" / "data"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder shared/data with real images is absent")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> DecodedCache:
    return decoded_cache(tmp_path_factory.mktemp("cache"))


def options(path: str, **section: object) -> DataOptions:
    return DataOptions.model_validate({"source": "table", "path": path, "image_size": 24, **section})


def read(cache: DecodedCache, path: str, **section: object) -> Federation:
    return read_federation(options(path, **section), 0, SHARED, cache)


def lesions() -> dict[str, str]:
    with (SHARED / "ham10000_sites" / "metadata.csv").open(newline="") as file:
        return {row["image"]: row["lesion_id"] for row in csv.DictReader(file)}


def test_four_sites_of_ham10000(cache):
    federation = read(cache, "ham10000_sites", max_train_per_client=60, max_test_per_client=40)
    assert federation.names == ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
    assert federation.classes == ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
    assert federation.modalities == ("dermoscopy",)
    assert federation.counts("train").sum(axis=1).tolist() == [60] * 4
    assert federation.counts("train")[2, 0] == 0  # molemax has no akiec
    assert federation.client("rosendahl").train.images.shape == (60, 24, 24, 3)
    again = read(cache, "ham10000_sites", max_train_per_client=60, max_test_per_client=40)
    for split in SPLITS:
        for one, two in zip(federation.clients, again.clients, strict=True):
            assert one.split(split).names == two.split(split).names
            assert np.array_equal(one.split(split).images, two.split(split).images)


def test_whole_ham10000_is_split_by_lesion():
    placement = place_records(options("ham10000_sites"), 0, SHARED)
    counts = {client: [len(rows[split]) for split in SPLITS] for client, rows in placement.rows.items()}
    assert sum(map(sum, counts.values())) == 10013
    assert [sum(column) for column in zip(*counts.values(), strict=True)] == [7012, 1043, 1958]
    fresh = place_records(options("ham10000_sites", split="group"), 0, SHARED)
    lesion, home = lesions(), {}
    for record, split in zip(fresh.listing.records, fresh.splits, strict=True):
        assert home.setdefault(lesion[record.name], split) == split
    tests = sum(len(rows["test"]) for rows in fresh.rows.values())
    assert tests / 10013 == pytest.approx(0.2, abs=0.005)


def test_fed_isic_official_fold_and_its_leakage():
    section = {"source": "fed-isic"}
    placement = place_records(options("ham10000_sites", **section), 0, SHARED)
    assert list(placement.rows) == ["vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias"]
    sizes = [[len(rows[split]) for split in SPLITS] for rows in placement.rows.values()]
    assert sizes == [[3163, 0, 791], [2691, 0, 672], [1807, 0, 452], [349, 0, 88]]  # two duplicates were removed
    leaks = "vidir_molemax 1, vidir_modern 487, rosendahl 223, vienna_dias 49"
    assert any(note.endswith(leaks) for note in placement.notes)
    grouped = place_records(options("ham10000_sites", split="lesion", **section), 0, SHARED)
    assert not any("official fold" in note for note in grouped.notes)


def test_one_modality_a_client(cache):
    caps = {"max_train_per_client": 12, "max_test_per_client": 6, "val_fraction": 0}
    by_modality = read(cache, "multimodal_sa", partition={"kind": "modality"}, **caps)
    by_site = read(cache, "multimodal_sa", **caps)
    assert by_modality.names == by_modality.modalities
    assert len(by_modality.names) == len(by_site.names) == 6
    assert "mednist_ct" in by_site.names
    trained = by_modality.counts("train") > 0
    assert np.all(trained.sum(axis=0) == 1)  # every class at one client
    assert [set(client.train.modality.tolist()) for client in by_modality.clients] == [{i} for i in range(6)]


def test_arrays_named_by_a_table_and_read_directly(cache):
    section = {"channels": 1, "partition": {"kind": "quantity", "clients": 2}, "max_train_per_client": 30}
    table = read(cache, "pneumoniamnist_28", **section)
    direct = read(cache, "pneumoniamnist_28/pneumoniamnist.npz", source="medmnist", **section)
    assert table.classes == direct.classes == ("normal", "pneumonia")
    for one, two in zip(table.clients, direct.clients, strict=True):
        assert one.train.names == two.train.names
        assert np.array_equal(one.test.images, two.test.images)


def test_no_sites_suggests_a_partition():
    with pytest.raises(InputError, match=r"bccd_cells.*1533 rows have no site.*kind = \"dirichlet\""):
        place_records(options("bccd_cells"), 0, SHARED)
    dealt = place_records(options("bccd_cells", partition={"kind": "dirichlet", "clients": 3}), 0, SHARED)
    assert sum(len(rows[split]) for rows in dealt.rows.values() for split in SPLITS) == 1533


def test_a_table_without_val_keeps_its_train_unless_asked():
    sizes = [
        [len(placement.rows["client-0"][split]) for split in SPLITS]
        for fraction in (None, 0.1)
        for placement in [
            place_records(
                options("brain_tumor_mri", partition={"kind": "quantity", "clients": 1}, val_fraction=fraction),
                0,
                SHARED,
            )
        ]
    ]
    assert sizes[0] == [2556, 0, 314]
    assert sizes[1][0] + sizes[1][1] == 2556
    assert sizes[1][1] == pytest.approx(256, abs=2)


def test_questions_about_images_are_no_table_for_this():
    with pytest.raises(InputError, match=r"1 rows have no label: row 168"):
        place_records(options("vqa_rad"), 0, SHARED)


def test_paths_with_parentheses_and_spaces(tmp_path, cache):
    folder = tmp_path / "my scans (old)"
    folder.mkdir()
    sources = sorted((SHARED / "ham10000_sites" / "images").glob("*.jpg"))[:12]
    lines = ["image,label,site"]
    for i, source in enumerate(sources):
        name = f"image ({i}) copy.jpg"
        shutil.copy(source, folder / name)
        lines.append(f"{name},{'ab'[i % 2]},s")
    (folder / "metadata.csv").write_text("\n".join(lines))
    assert check_data(folder).fit
    federation = read_federation(options(str(folder)), 0, cache=cache)
    assert sum(len(federation.clients[0].split(split)) for split in SPLITS) == 12


def test_checking_finds_what_is_known(tmp_path):
    report = check_data(SHARED / "pneumoniamnist_28")
    kinds = {found.kind: found for found in report.findings}
    assert kinds["duplicate-across-splits"].count == 8
    assert "no-sites" in kinds
    assert not report.fit
    vqa = {found.kind: found.count for found in check_data(SHARED / "vqa_rad").findings}
    assert vqa["unknown-split"] == 204  # 203 images in both splits and one in none
    assert vqa["empty-label"] == 1
