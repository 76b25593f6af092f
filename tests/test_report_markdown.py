"""The Markdown page says what the results say, in tables that every reader of Markdown takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from report_fixtures import METHODS, World, write_compare, write_run
from wardround.errors import InputError
from wardround.report.markdown import write_markdown

WORLD = World(clients=("north", "east | west", "south"), sizes=(300, 200, 80), rounds=3)
COMMAND = "wardround compare sites.toml --methods isolated,pafp --seeds 2"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A comparison's folder and its page."""
    folder = tmp_path_factory.mktemp("compared")
    write_compare(folder, WORLD, METHODS, seeds=(0, 1))
    (folder / "command.txt").write_text(COMMAND + "\n")
    return folder, write_markdown(folder, folder / "pages" / "table.md").read_text()


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading."""
    table = re.search(r"(?:^\|.*\n?)+", text[text.index(heading) :], re.M)
    assert table is not None
    return [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in table[0].splitlines()]


def test_every_table_is_rectangular(page: tuple[Path, str]) -> None:
    """A client's name with a bar in it does not make another column."""
    for table in re.findall(r"(?:^\|.*\n?)+", page[1], re.M):
        widths = {len(re.split(r"(?<!\\)\|", line.strip())) for line in table.splitlines()}
        assert len(widths) == 1


def test_figures_are_those_of_the_results(page: tuple[Path, str]) -> None:
    folder, text = page
    head, _, *body = rows(text, "## Balanced accuracy")
    column = [name.strip() for name in head].index("unweighted avg.")
    files = {f["label"]: f for f in (json.loads(p.read_text()) for p in folder.glob("*/results.json"))}
    assert {row[0].strip() for row in body} == files.keys()
    for row in body:
        figure = files[row[0].strip()]["summary"]["unweighted_average"]["mean"]
        assert f"{100 * figure:.1f} ±" in row[column]


def test_the_best_is_bold_and_the_second_in_italics(page: tuple[Path, str]) -> None:
    head, _, *body = rows(page[1], "## Balanced accuracy")
    column = [name.strip() for name in head].index("unweighted avg.")
    cells = {row[0].strip(): row[column].strip() for row in body}
    means = {label: float(cell.strip("*").split(" ")[0]) for label, cell in cells.items() if label != "Isolated"}
    best = max(means, key=lambda label: means[label])
    assert cells[best].startswith("**")
    assert sum(cell.startswith("**") for cell in cells.values()) == 1
    assert sum(bool(re.match(r"\*[^*]", cell)) for cell in cells.values()) == 1


def test_what_a_reader_needs_to_repeat_it_is_there(page: tuple[Path, str]) -> None:
    text = page[1]
    assert f"\n    {COMMAND}\n" in text
    for needed in ("this test set would show", "up, a client and round", "## Where it ran", "torch", "points"):
        assert needed in text


def test_a_single_run_has_a_page_too(tmp_path: Path) -> None:
    write_run(tmp_path / "run", WORLD, METHODS[1], 0)
    text = write_markdown(tmp_path / "run", tmp_path / "run.md").read_text()
    assert "## Balanced accuracy" in text
    assert "more than noise?" not in text


def test_no_folder_no_page(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such folder"):
        write_markdown(tmp_path / "nothing", tmp_path / "page.md")
    assert not (tmp_path / "page.md").exists()
