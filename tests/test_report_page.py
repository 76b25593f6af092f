"""The report as a reader's browser gets it: self-contained, escaped, accessible, and right."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from report_fixtures import (
    METHODS,
    Method,
    World,
    metric_lines,
    run_results,
    tiny_federation,
    write_compare,
    write_run,
    write_skew,
)
from wardround.report.images import save_samples
from wardround.report.page import write_report

HOSTILE = '<b>x</b> & "y" $z$ {{ 7 * 7 }}'
SMALL = World(clients=("north", HOSTILE, "south"), sizes=(300, 200, 80), rounds=4)
VOID = {"meta", "br", "img", "wbr", "line", "rect", "path", "use"}


class Page(HTMLParser):
    """A page as a list of (tag, attributes, text inside), with text of nested tags counted for all of them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[tuple[str, list[str]]] = []
        self.feed(self.text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        words: list[str] = []
        self.elements.append((tag, {name: value or "" for name, value in attrs}, words))
        if tag not in VOID:
            self._open.append((tag, words))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        opened, _ = self._open.pop()
        assert opened == tag, f"<{opened}> is closed by </{tag}>"
        if tag in ("td", "th"):
            self.handle_data(" ")

    def handle_data(self, data: str) -> None:
        for _, words in self._open:
            words.append(data)

    def all(self, *tags: str) -> list[tuple[dict[str, str], str]]:
        """Attributes and text of every element called one of `tags`."""
        return [(attrs, " ".join("".join(words).split())) for tag, attrs, words in self.elements if tag in tags]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = write_compare(tmp_path_factory.mktemp("compare"), SMALL, METHODS, seeds=(0, 1))
    write_skew(folder, SMALL)
    save_samples(tiny_federation(SMALL), folder)
    return Page(write_report(folder))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Page:
    refused = [(2, 1, "not finite: <i>features.6</i>"), (3, 0, "late: 31 s, the deadline is 30 s")]
    return Page(write_report(write_run(tmp_path_factory.mktemp("run"), SMALL, refused=refused)))


@pytest.fixture(params=["compared", "single"])
def page(request: pytest.FixtureRequest) -> Page:
    found: Page = request.getfixturevalue(request.param)
    return found


def test_nothing_is_loaded_from_anywhere(page: Page) -> None:
    assert not re.search(r"https?://|url\((?!#)|@import|<script|<link", page.text)
    for tag, attrs, _ in page.elements:
        for name in ("src", "href", "xlink:href", "data", "action"):
            assert attrs.get(name, "#").startswith(("#", "data:image/jpeg;base64,")), (tag, attrs[name])


def test_every_internal_link_and_reference_has_one_target(page: Page) -> None:
    ids = [attrs["id"] for _, attrs, _ in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'(?:href="#|url\(#|labelledby=")([^")]+)', page.text))
    assert len(wanted) > 10
    assert wanted <= set(ids)


def test_names_are_text_wherever_they_appear(page: Page) -> None:
    assert "<b>" not in page.text
    assert "<i>" not in page.text
    assert "{{ 7 * 7 }}" in page.text
    headings = [text for _, text in page.all("th")]
    assert HOSTILE in headings
    panels = [text for _, text in page.all("text")]
    assert any(text.startswith("<b>x</b> &") for text in panels)


def test_pictures_have_text_alternatives_and_tables_have_headers(page: Page) -> None:
    drawn = [attrs for attrs, _ in page.all("svg")]
    for attrs in drawn:
        alternative = attrs.get("aria-label", "")
        assert attrs.get("aria-hidden") == "true" or (attrs["role"] == "img" and len(alternative) > 30), attrs
    assert sum("role" in attrs for attrs in drawn) > 8
    for attrs, _ in page.all("img"):
        assert len(attrs["alt"]) > 20
    for attrs, text in page.all("th"):
        assert attrs["scope"] in ("row", "col"), text
    tables, heads = page.all("table"), page.all("thead")
    assert len(tables) == len(heads) > 4


def test_contents_list_every_section(page: Page) -> None:
    listed = {attrs["href"] for attrs, _ in page.all("a") if "class" not in attrs}
    sections = {f"#{attrs['aria-labelledby']}" for attrs, _ in page.all("section")}
    assert sections - {"#beware"} == listed


def rows_of(page: Page, table: int) -> dict[str, list[tuple[str, str]]]:
    """Row label -> (cell text, "strong", "em" or "") for the table number `table` of class `results`."""
    source = re.findall(r'<table class="results">.*?</table>', page.text, re.DOTALL)[table]
    found = {}
    for label, rest in re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', source.replace("<wbr>", ""), re.DOTALL):
        cells = re.findall(r"<td[^>]*>(?:<(strong|em)>)?([^<]*)", rest)
        found[label] = [(text, mark) for mark, text in cells]
    return found


def test_best_is_bold_second_is_italic_and_isolated_stands_apart(compared: Page) -> None:
    rows = rows_of(compared, 0)
    assert next(iter(rows)) == "isolated"
    assert {mark for _, mark in rows.pop("isolated")} == {""}
    results = {m.label: [run_results(SMALL, m, seed) for seed in (0, 1)] for m in METHODS if m.shares}
    for column, client in enumerate(SMALL.clients):
        shown = {
            label: round(50 * sum(r["clients"][client]["balanced_accuracy"][0] for r in both), 1)
            for label, both in results.items()
        }
        ordered = sorted(set(shown.values()), reverse=True)
        for label, cells in rows.items():
            text, mark = cells[column]
            assert text.startswith(f"{shown[label]:.1f} ± ")
            place = ordered.index(shown[label])
            assert mark == {0: "strong", 1: "em"}.get(place, ""), (client, label, shown)


def test_summary_names_the_best_method_and_what_the_test_set_can_show(compared: Page) -> None:
    lead = next(text for attrs, text in compared.all("p") if attrs.get("class") == "lead")
    means = {}
    for method in METHODS:
        each = [run_results(SMALL, method, seed)["summary"]["unweighted_average"]["mean"] for seed in (0, 1)]
        means[method.label] = sum(each) / 2
    best = max(means, key=lambda label: means[label])
    assert f"{best} has the highest balanced accuracy, {100 * means[best]:.1f} %" in lead
    assert re.search(r"smallest true difference that this test set would show .* is about \d+\.\d points", lead)
    assert re.search(r"(better|worse) by more than noise than|cannot be told apart from", lead)


def test_refused_updates_are_named_first_and_once(single: Page) -> None:
    box = next(text for attrs, text in single.all("section") if attrs.get("class") == "warnings")
    assert "2 updates were refused and did not count." in box
    assert f"{HOSTILE} (round 2, seed 0): not finite: <i>features.6</i>" in box
    assert "north (round 3, seed 0): late: 31 s, the deadline is 30 s" in box
    assert box.count("late: 31 s") == 1


def test_recorded_warnings_and_coarse_test_sets_are_named(compared: Page) -> None:
    box = next(text for attrs, text in compared.all("section") if attrs.get("class") == "warnings")
    assert "pafp and pafp-alt T=2: Statistics leave clients with fewer than 100 training images: south." in box
    # Of HOSTILE's 50 test images one class has 1, among four classes: 1 / (4 * 1).
    assert f"{HOSTILE}: 1 test image of melanoma, worth 25 points each" in box


def test_cached_views_and_the_arithmetic_are_named(tmp_path: Path) -> None:
    page = Page(write_report(write_run(tmp_path / "run", replace(SMALL, rounds=1, views=4), METHODS[0])))
    assert "isolated trained on 4 cached views of each augmented image" in page.text
    assert "training.precision float32" in [text for _, text in page.all("tr")]


def test_bytes_are_those_of_the_messages(single: Page) -> None:
    size = 4 * 125_600 + 310
    row = next(text for _, text in single.all("tr") if "120,000" in text)
    assert row == f"pafp-alt T=2 {size / 1000:.0f} kB {size / 1000:.0f} kB {12 * size / 1e6:.2f} MB " + (
        f"{12 * size / 1e6:.2f} MB 120,000 5,600 123,600"
    )
    assert "÷ fedavg" not in single.text


def test_methods_are_compared_over_local_epochs(compared: Page, single: Page) -> None:
    """One chart a figure for the mean over clients, one for each client; a run alone is drawn over its rounds."""
    charts = [attrs["aria-label"] for tag, attrs, _ in compared.elements if tag == "svg" and "aria-label" in attrs]
    over = [words.split(",")[1] for words in charts if "over the local epochs" in words]
    assert over[:2] == [" Accuracy", " Balanced accuracy"]
    assert len(over) == 2 + len(SMALL.clients)
    assert "passes over its training images, whatever part of the model each trains" in compared.text
    assert "local epoch" not in single.text


def test_uploads_are_compared_with_federated_averaging(compared: Page) -> None:
    """118,000 shared parameters, and of the last two methods 5,600 statistics: 123,600 / 118,000 = 1.047."""
    rows = [text for _, text in compared.all("tr") if text.endswith(("0.000", "1.000", "1.047"))]
    assert [row.split()[-2:] for row in rows] == [
        ["0", "0.000"], ["118,000", "1.000"], ["123,600", "1.047"], ["123,600", "1.047"],
    ]  # fmt: skip


def test_commands_that_repeat_the_runs_are_complete(compared: Page) -> None:
    commands = compared.all("pre")[-1][1]
    assert commands.count("wardround run") == len(METHODS) * 2
    assert "pafp-alt-T2/seed-1/config.toml --out" in commands


def test_an_unfinished_run_shows_what_there_is(tmp_path: Path) -> None:
    page = Page(write_report(write_run(tmp_path / "killed", SMALL, METHODS[2], finished_rounds=2)))
    assert "This run of pafp is unfinished: it stands at round 2 of 4." in page.text
    last = {
        line["client"]: line["personal"]["test"]["balanced_accuracy"]
        for line in metric_lines(SMALL, METHODS[2], 0, 2)
        if line.get("personal")
    }
    cells = [text for text, _ in rows_of(page, 0)["pafp"]]
    assert cells[:3] == [f"{100 * last[name]:.1f}" for name in SMALL.clients]


def test_a_run_that_has_only_begun_and_a_comparison_without_results_have_a_page(tmp_path: Path) -> None:
    begun = write_run(tmp_path / "compare" / "fedavg" / "seed-0", SMALL, METHODS[1], finished_rounds=0)
    for folder in (begun, tmp_path / "compare"):
        page = Page(write_report(folder))
        assert "No run has been evaluated yet." in page.text
        assert "federation" in {attrs.get("id") for attrs, _ in page.all("h2")}


def test_a_method_with_a_hostile_label_is_escaped(tmp_path: Path) -> None:
    method = Method("fedavg", "a<script>alert(1)</script>", 0.6)
    write_run(tmp_path / "x" / "seed-0", SMALL, method)
    assert "<script" not in Page(write_report(tmp_path)).text


def test_the_same_folder_gives_the_same_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SMALL)
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first


def test_sample_images_are_embedded(compared: Page) -> None:
    sources: list[dict[str, Any]] = [attrs for attrs, _ in compared.all("img")]
    assert [attrs["alt"].split(",")[0] for attrs in sources] == [
        f"Sample training images of {name}" for name in SMALL.clients
    ]
