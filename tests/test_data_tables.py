"""Tables and folders to records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wardround.data.folders import read_folders
from wardround.data.options import ColumnNames
from wardround.data.records import natural_order
from wardround.data.tables import read_table
from wardround.errors import InputError


def table(folder: Path, text: str, name: str = "metadata.csv") -> Path:
    (folder / name).write_text(text)
    return folder


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(path)


def test_a_table_gives_a_record_a_row(tmp_path):
    text = "image,label,site,split,patient_id,age\na/b (1).png,x,s1,train,p1,40\nc d.png,y,s2,Validation,p2,\n"
    first, second = read_table(table(tmp_path, text)).records
    assert first.image.path == tmp_path / "a" / "b (1).png"
    assert (first.label, first.site, first.split, first.group, first.row) == ("x", "s1", "train", "p1", 2)
    assert (second.name, second.split, second.row) == ("c d.png", "val", 3)
    assert first.cells["age"] == "40"


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_quotes_and_byte_order_mark(tmp_path, separator):
    text = separator.join(["image", "label"]) + "\n" + separator.join(['"a,;b.png"', "x"]) + "\r\n\n"
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (record,) = read_table(tmp_path / "t.csv").records
    assert (record.name, record.label) == ("a,;b.png", "x")


def test_named_columns(tmp_path):
    text = "file,dx,hospital,subject,group\na.png,x,h,s,g\n"
    names = ColumnNames(image="file", label="dx", site="hospital", group="subject")
    (record,) = read_table(table(tmp_path, text), names).records
    assert (record.label, record.site, record.group) == ("x", "h", "s")


@pytest.mark.parametrize(("columns", "group"), [("lesion_id", "7"), ("lesion_id,patient_id", "8"), ("other", "")])
def test_the_group_column_is_found(tmp_path, columns, group):
    values = ",".join("78"[: columns.count(",") + 1])
    (record,) = read_table(table(tmp_path, f"image,label,{columns}\na.png,x,{values}\n")).records
    assert record.group == group


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("picture,label\na,b\n", "missing columns: image; found: picture, label"),
        ("image,label\na,b,c\nd\n", "header has 2 cells, but row 2 has 3, row 3 has 1"),
        ("", "the table is empty"),
        ("image,label,label\n", "columns repeat: label"),
    ],
)
def test_a_malformed_table_is_named(tmp_path, text, message):
    with pytest.raises(InputError, match=rf"metadata\.csv.*{message}"):
        read_table(table(tmp_path, text))


def test_a_named_column_must_exist(tmp_path):
    with pytest.raises(InputError, match="missing columns: hospital"):
        read_table(table(tmp_path, "image,label\na,b\n"), ColumnNames(site="hospital"))


def test_no_table_and_no_text(tmp_path):
    with pytest.raises(InputError, match=r"metadata\.csv: no such file"):
        read_table(tmp_path)
    (tmp_path / "metadata.csv").write_bytes(b"image,label\n\xff\xfe\n")
    with pytest.raises(InputError, match="UTF-8"):
        read_table(tmp_path)


def test_repeated_images_get_distinct_names(tmp_path):
    listing = read_table(table(tmp_path, "image,label\na.png,x\na.png,x\n"))
    assert [record.name for record in listing.records] == ["a.png", "a.png (row 3)"]
    assert "repeat an image" in listing.notes[0]


def test_labels_in_natural_order():
    assert natural_order(["10", "9", "cat", "Ant"]) == ("9", "10", "Ant", "cat")


def test_folders_with_and_without_splits(tmp_path):
    for name in ["b/x/2.png", "b/x/1.JPG", "b/y/deep er/3.png", "a/train/x/4.png", "a/test/x/5 (1).png"]:
        picture(tmp_path / name)
    (tmp_path / "b" / "x" / "notes.txt").write_text("")
    (tmp_path / "b" / "x" / ".hidden.png").write_text("")
    listing = read_folders(tmp_path)
    found = [(record.site, record.split, record.label, record.name) for record in listing.records]
    assert found == [
        ("a", "test", "x", "a/test/x/5 (1).png"),
        ("a", "train", "x", "a/train/x/4.png"),
        ("b", "", "x", "b/x/1.JPG"),
        ("b", "", "x", "b/x/2.png"),
        ("b", "", "y", "b/y/deep er/3.png"),
    ]
    assert listing.label_space == ("x", "y")
    assert listing.notes == ("1 files are not images of a class and were left out: b/x/notes.txt",)


def test_a_class_called_train_beside_others_is_a_class(tmp_path):
    picture(tmp_path / "site" / "train" / "1.png")
    picture(tmp_path / "site" / "bus" / "2.png")
    assert [record.label for record in read_folders(tmp_path).records] == ["bus", "train"]


def test_no_folder_and_no_images(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        read_folders(tmp_path / "none")
    with pytest.raises(InputError, match="no images found"):
        read_folders(tmp_path)
