"""The commands as a person types them: exit statuses, what is said, and what a program can parse."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from experiment_fixtures import CLIENTS, command_line, in_a_process, tiny_file
from wardround import experiment as engine
from wardround.cli import app


def wardround(*arguments: object) -> Result:
    """`wardround ARGUMENTS` in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def refused(*arguments: object) -> str:
    """What is said, in one line and without the signs of life before it, by a command that exits with 2."""
    result = wardround(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(line.strip() for line in result.stderr.splitlines() if not line.endswith(" ..."))


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an experiment file, in which one run and one comparison have been made."""
    folder = tmp_path_factory.mktemp("place")
    file = tiny_file(folder, rounds=2, training__lr=0.3)
    assert wardround("run", file, "--out", folder / "run", "--workers", 2).exit_code == 0
    compared = wardround("compare", file, "--methods", "isolated,ft-2B", "--out", folder / "compare", "--no-skew")
    assert compared.exit_code == 0
    return folder


# ---- start


def test_help_and_import_need_no_torch() -> None:
    script = """
import sys
import wardround
from typer.testing import CliRunner
from wardround.cli import app
for arguments in (["--help"], ["run", "--help"], ["--version"], ["backbones"]):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (arguments, result.output)
    heavy = {"torch", "torchvision", "timm", "sklearn", "scipy", "matplotlib"} & set(sys.modules)
    assert not heavy, (arguments, heavy)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_lists_every_command() -> None:
    said = wardround("--help").output
    names = "run compare tune skew report predict export methods datasets backbones keys check-data flower"
    for name in names.split():
        assert re.search(rf"\b{name}\b", said)


def test_without_a_command_help_is_shown_and_the_status_is_2() -> None:
    result = wardround()
    assert (result.exit_code, "Usage" in result.output) == (2, True)
    assert wardround("runn").exit_code == 2
    assert wardround("run").exit_code == 2


def test_the_version_is_the_packages() -> None:
    from wardround import __version__

    assert wardround("--version").output == f"{__version__}\n"


# ---- lists


@pytest.mark.parametrize(
    "arguments",
    [
        ["methods"], ["methods", "pafp-alt"], ["methods", "FT-2b"], ["methods", "isolated"],
        ["datasets"], ["datasets", "derma"], ["backbones"], ["backbones", "Lite0"], ["keys"], ["keys", "data.phantoms"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_lists_fit_into_80_columns_and_lose_nothing(arguments: list[str]) -> None:
    result = wardround(*arguments)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.output, "rich has cut something"
    assert not re.search(r"\[/?(bold|dim|italic)", result.output)


@pytest.mark.parametrize("arguments", [["methods"], ["datasets"], ["backbones"], ["keys"], ["methods", "pafp"]])
def test_lists_are_json_for_programs(arguments: list[str]) -> None:
    result = wardround(*arguments, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert isinstance(found, list if len(arguments) == 1 else dict)
    if arguments == ["backbones"]:
        assert all(entry["name"] and entry["citation"] for entry in found)


def test_a_methods_keys_come_with_default_meaning_and_what_is_allowed() -> None:
    keys = {one["key"]: one for one in json.loads(wardround("methods", "pafp-alt", "--json").stdout)["keys"]}
    assert keys["every"]["default"] == 2
    assert keys["every"]["allowed"] == "whole number >= 1"
    assert keys["schedule"]["allowed"] == "exclusive | additive"
    assert "lambda" in keys
    assert "strength" not in keys
    text = wardround("methods", "pafp-alt").output
    assert re.search(r"every +2 +local parameters train in every T-th round \(T\) \[whole", text)
    assert re.search(r"lr_local +none ", text)


def test_a_preset_shows_what_it_stands_for() -> None:
    said = wardround("methods", "ft-2b").output
    assert "preset for `compare`: method.name = fedavg, model.finetune_blocks = 2" in " ".join(said.split())


def test_a_name_that_is_not_there_is_suggested_the_nearest() -> None:
    assert refused("methods", "fedagv") == "wardround: there is no method 'fedagv' (did you mean 'fedavg'?)"
    assert "nothing here has 'zzz' in its name" in refused("backbones", "zzz")
    assert "did you mean 'training'?" in refused("keys", "trainin")


# ---- run


def test_run_says_what_came_out(place: Path) -> None:
    result = wardround("run", place / "tiny.toml", "--out", place / "run", "--resume")
    assert result.exit_code == 0
    assert "Balanced accuracy of each client's own model" in result.stdout
    for heading in (*CLIENTS, "weighted avg.", "unweighted avg.", "variance", "pooled", "worst client"):
        assert heading in result.stdout
    assert re.search(r"communication: [\d.]+ MB up, [\d.]+ MB down in 2 rounds", result.stdout)
    assert f"report: {place / 'run' / 'report.html'}" in result.stdout
    assert (place / "run" / "report.html").stat().st_size > 10_000


def test_run_gives_lines_where_there_is_no_terminal_and_json_to_programs(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = wardround("run", place / "tiny.toml", "--json", "--set", "method.name=isolated", "--set", "rounds=1")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads((tmp_path / "runs/tiny-isolated/results.json").read_text())
    assert re.search(r"^round 1/1  balanced accuracy 0\.\d{3}  [\d.]+ s a round, 0 s left$", result.stderr, re.M)
    assert "\x1b" not in result.stderr


def test_notes_and_warnings_of_a_run_are_said(place: Path) -> None:
    changed = ["--set", "method.name=pafp", "--set", "rounds=0"]
    result = wardround("run", place / "tiny.toml", "--out", place / "noted", *changed)
    assert result.exit_code == 0
    assert "note: Feature skew 0.5" in result.stderr
    assert "warning: Per-element statistics leave clients with fewer than 100 training images" in result.stderr


def test_a_second_run_into_a_folder_is_refused(place: Path) -> None:
    said = refused("run", place / "tiny.toml", "--out", place / "run")
    assert said == f"wardround: {place}/run: holds a run already; give another --out, or --resume to go on with it"


def test_resume_with_another_configuration_names_the_keys(place: Path) -> None:
    said = refused("run", place / "tiny.toml", "--out", place / "run", "--resume", "--set", "training.lr=0.5")
    assert said.endswith("belongs to another experiment: training.lr: 0.3 -> 0.5")


def test_a_failing_run_exits_1_and_names_the_clients(place: Path, tmp_path: Path) -> None:
    diverging = ["--set", "training.lr=1e20", "--set", "training.clip_norm=none"]
    result = wardround("run", place / "tiny.toml", "--out", tmp_path / "run", *diverging)
    assert result.exit_code == 1
    assert "clients gave a usable answer, the quorum is 2" in result.stderr
    assert "a smaller training.lr may help" in result.stderr


# ---- compare


def test_compare_says_what_came_out_and_keeps_what_is_finished(place: Path) -> None:
    arguments = ["compare", place / "tiny.toml", "--methods", "isolated,ft-2B", "--out", place / "compare", "--no-skew"]
    result = wardround(*arguments)
    assert result.exit_code == 0
    assert "isolated, seed 3: finished before, kept" in result.stderr
    assert "Balanced accuracy of the server's model" in result.stdout
    assert re.search(r"^- .*\b(isolated and ft-2B|ft-2B and isolated)\b", result.stdout, re.M)
    assert f"report: {place / 'compare' / 'report.html'}" in result.stdout
    assert list(json.loads(wardround(*arguments, "--json").stdout)["methods"]) == ["isolated", "ft-2B"]


def test_compare_shows_what_is_finished_when_one_system_fails(place: Path) -> None:
    bad = "fedavg:training.lr=1e20:training.clip_norm=none"
    result = wardround(
        "compare", place / "tiny.toml", "--methods", f"isolated,{bad}", "--out", place / "compare", "--no-skew"
    )
    assert result.exit_code == 1
    assert "isolated" in result.stdout
    assert f"report: {place / 'compare' / 'report.html'}" in result.stdout
    assert f"wardround: {bad}, seed 3: round 1: " in result.stderr


def test_compare_measures_skew_first(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wardround import measuring

    calls: list[int] = []
    monkeypatch.setattr(measuring, "measure_skew", lambda *_, **__: calls.append(1) or {"clients": []})
    arguments = ["compare", place / "tiny.toml", "--methods", "isolated", "--set", "rounds=0", "--out", tmp_path / "c"]
    wardround(*arguments)
    wardround(*arguments)
    assert calls == [1], "once is enough"
    assert refused(*arguments, "--reference", "fedavg").startswith("wardround: --reference fedavg: is not among")


def test_compare_explains_wrong_names(place: Path) -> None:
    said = refused("compare", place / "tiny.toml", "--methods", "pafp:mloc=1", "--out", place / "new")
    assert said == ("wardround: --methods pafp:mloc=1: method.mloc: there is no such key (did you mean 'm_loc'?)")
    assert not (place / "new").exists()


def test_ctrl_c_in_a_comparison_exits_130(place: Path, tmp_path: Path) -> None:
    from wardround.display import CompareDisplay

    def work() -> None:
        CompareDisplay.advanced = lambda *_: signal.raise_signal(signal.SIGINT)  # type: ignore[method-assign]
        command_line(
            "compare", place / "tiny.toml", "--methods", "isolated,fedavg", "--out", tmp_path / "c", "--no-skew"
        )

    words = tmp_path / "words"
    assert in_a_process(work, words) == 130
    assert "the same command goes on" in words.read_text()


# ---- after a run


def test_skew_report_predict_and_export(place: Path, tmp_path: Path) -> None:
    file, run = place / "tiny.toml", place / "run"
    skew = wardround("skew", file, "--out", tmp_path / "skew", "--permutations", 20)
    assert skew.exit_code == 0
    assert f"written to {tmp_path / 'skew' / 'skew.json'}" in skew.stdout
    as_json = wardround("skew", file, "--out", tmp_path / "skew", "--permutations", 20, "--json")
    assert json.loads(as_json.stdout) == json.loads((tmp_path / "skew" / "skew.json").read_text())

    (run / "report.html").unlink()
    assert wardround("report", run).stdout == f"{run / 'report.html'}\n"
    assert (run / "report.html").exists()

    image, exported = tmp_path / "new.png", tmp_path / "model.safetensors"
    Image.fromarray(np.full((40, 50, 3), 120, np.uint8)).save(image)
    found = json.loads(wardround("predict", run, image, "--client", "site-02", "--json").stdout)
    assert wardround("export", run, "--client", "site-02", "--to", exported).stdout == f"{exported}\n"
    assert json.loads(wardround("predict", exported, image, "--json").stdout) == found
    ranked = sorted(found[0]["probabilities"].items(), key=lambda item: -item[1])
    said = wardround("predict", run, image, "--client", "site-02").stdout
    assert said == f"{image}: " + "  ".join(f"{name} {share:.3f}" for name, share in ranked) + "\n"
    server = wardround("predict", run, image, "--client", "site-02", "--model", "server", "--json")
    assert json.loads(server.stdout)[0]["logits"] != found[0]["logits"]


def test_wrong_uses_of_a_run_are_explained(place: Path, tmp_path: Path) -> None:
    image = tmp_path / "absent.png"
    assert refused("predict", place / "run", image, "--client", "site-2").endswith("(did you mean 'site-02'?)")
    assert refused("predict", place / "run", image).endswith("has site-01, site-02, site-03")
    assert refused("predict", place / "run", image, "--client", "site-02").endswith("absent.png: no such file")
    assert "it is a comparison: take one of its runs" in refused(
        "export", place / "compare", "--client", "a", "--to", "b"
    )
    assert refused("report", place / "nowhere").endswith("nowhere: there is no such folder")
    assert "neither a run" in refused("report", tmp_path)


# ---- check-data, and bad input


def _picture(file: Path, level: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    stream = np.random.default_rng(level)
    Image.fromarray(stream.integers(0, 255, (32, 32, 3), np.uint8)).save(file)


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    """A table of two sites and two classes, split; `spoil` changes its rows before they are written."""

    def make(spoil: Callable[[list[dict[str, str]]], object] = lambda rows: None) -> Path:
        rows: list[dict[str, str]] = []
        for number in range(24):
            name = f"{number}.png"
            _picture(tmp_path / "images" / name, number)
            split = "test" if number % 4 == 0 else "train"
            site, label = ("north", "south")[number // 12], ("benign", "malignant")[number % 2]
            label = label if split == "train" else ("benign", "malignant")[(number // 4) % 2]
            rows.append({"image": name, "label": label, "site": site, "split": split})
        spoil(rows)
        with (tmp_path / "images" / "metadata.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return tmp_path / "images"

    return make


@pytest.fixture
def on_table(tmp_path: Path) -> Callable[..., list[object]]:
    """The arguments of a run on a table."""

    def arguments(folder: Path, *changes: str) -> list[object]:
        file = tiny_file(tmp_path, rounds=1)
        settings = ["data.source=table", f"data.path={folder}", *changes]
        return ["run", file, "--out", tmp_path / "run", *(part for text in settings for part in ("--set", text))]

    return arguments


def test_a_table_that_is_fit_runs(table: Callable[..., Path], on_table: Callable[..., list[object]]) -> None:
    folder = table()
    checked = wardround("check-data", folder)
    assert (checked.exit_code, "fit for use" in checked.output) == (0, True)
    assert wardround(*on_table(folder)).exit_code == 0


def test_check_data_finds_everything_at_once_and_exits_2(table: Callable[..., Path], tmp_path: Path) -> None:
    def spoil(rows: list[dict[str, str]]) -> None:
        (tmp_path / "images" / "3.png").write_bytes(b"no image")
        (tmp_path / "images" / "5.png").unlink()
        (tmp_path / "images" / "8.png").write_bytes((tmp_path / "images" / "9.png").read_bytes())
        rows[7]["site"] = ""

    folder = table(spoil)
    result = wardround("check-data", folder)
    assert result.exit_code == 2
    for kind in ("unreadable-image", "missing-file", "duplicate-across-splits", "empty-site"):
        assert f"[{kind}]" in result.output
    report = json.loads(wardround("check-data", folder, "--json").stdout)
    assert report["fit"] is False
    assert wardround("check-data", tmp_path / "nowhere").exit_code == 2


def test_check_data_on_folders(tmp_path: Path) -> None:
    for site in "ab":
        for label in "xy":
            for number in range(2):
                _picture(tmp_path / site / label / f"{number}.png", ord(site) + 10 * ord(label) + number)
    assert wardround("check-data", tmp_path).exit_code == 0
    (tmp_path / "a" / "x" / "2.png").write_bytes(b"\x89PNG")
    result = wardround("check-data", tmp_path)
    assert result.exit_code == 2
    assert "a/x/2.png" in result.output


def test_check_data_reads_as_an_experiment_file_says(table: Callable[..., Path], tmp_path: Path) -> None:
    folder = table(lambda rows: [row.update(diagnosis=row.pop("label")) for row in rows])
    assert wardround("check-data", folder).exit_code == 2
    data = f'[data]\nsource = "table"\npath = "{folder}"\n'
    (tmp_path / "own.toml").write_text(data + '[data.columns]\nlabel = "diagnosis"\n')
    assert wardround("check-data", tmp_path / "own.toml").exit_code == 0
    assert refused("check-data", tiny_file(tmp_path)).endswith("so there are no files to check")


def test_missing_columns_are_named(table: Callable[..., Path], on_table: Callable[..., list[object]]) -> None:
    folder = table(lambda rows: [row.update(diagnosis=row.pop("label")) for row in rows])
    assert refused(*on_table(folder)) == (
        f"wardround: {folder}/metadata.csv: missing columns: label; found: image, site, split, diagnosis"
    )
    assert wardround(*on_table(folder, "data.columns.label=diagnosis")).exit_code == 0


def test_an_unknown_site_is_named(table: Callable[..., Path], on_table: Callable[..., list[object]]) -> None:
    said = refused(*on_table(table(), 'data.sites=["north", "west"]'))
    assert "data.sites: west not in" in said
    assert said.endswith("(allowed: north, south)")


def test_a_label_only_in_test_is_named(table: Callable[..., Path], on_table: Callable[..., list[object]]) -> None:
    said = refused(*on_table(table(lambda rows: rows[4].update(label="unheard-of"))))
    assert "labels without any training image, seen only in val or test: 'unheard-of' in row 6" in said


def test_an_image_that_does_not_decode_is_named_or_skipped_with_a_note(
    table: Callable[..., Path], on_table: Callable[..., list[object]]
) -> None:
    folder = table()
    (folder / "3.png").write_bytes(b"no image")
    assert f"{folder}/3.png: not a readable image" in refused(*on_table(folder))
    result = wardround(*on_table(folder, "data.on_bad_image=skip"))
    assert result.exit_code == 0
    notes = [line for line in result.stderr.splitlines() if line.startswith("note:")]
    assert any("3.png" in note for note in notes), notes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["model.finetune_blocks=9"],
            "model.finetune_blocks = 9: 'wardround:resnet4-lib' has 2 blocks (allowed: 0 to 2, or \"all\")",
        ),
        (
            ["method.name=pafp", "method.groups=7"],
            "GroupNorm groups = 7 does not divide 64 channels (allowed: 1, 2, 4, 8, 16, 32, 64)",
        ),
        (["model.backbone=timm:no_such_net"], "model.backbone"),
        (["training.device=gpu"], "training.device: 'gpu' cannot be used here"),
        (["model.pretrained=true"], "nobody publishes weights"),
        (["data.phantoms.famly=blood"], "data.phantoms.famly: there is no such key (did you mean 'family'?)"),
        (["data.source=table", "data.path=nowhere"], "no such file; a table is a CSV file or a folder"),
        (["data.source=medmnist", "data.flag=nomnist"], "nomnist"),
    ],
)
def test_what_cannot_be_run_is_explained(changes: list[str], message: str, place: Path, tmp_path: Path) -> None:
    settings = [part for text in changes for part in ("--set", text)]
    assert message in refused("run", place / "tiny.toml", "--out", tmp_path / "run", *settings)


def test_a_disk_that_fails_outside_a_run_is_a_message(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wardround.report import page

    def fail(_: Path) -> None:
        raise PermissionError(13, "Permission denied", "report.html")

    monkeypatch.setattr(page, "write_report", fail)
    result = wardround("report", place / "run")
    assert (result.exit_code, result.stderr) == (1, "wardround: report.html: Permission denied\n")


# ---- a terminal


def on_a_terminal(work: Callable[[], object]) -> str:
    """What `work`, in a forked process, writes to a terminal of 80 columns."""
    process, terminal = pty.fork()
    if process == 0:
        sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115 - until the end
        os.environ["TERM"] = "xterm"
        try:
            work()
        finally:
            sys.stdout.flush()
            os._exit(0)
    parts = []
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.waitpid(process, 0)
    os.close(terminal)
    return b"".join(parts).decode()


def test_a_run_draws_a_bar_on_a_terminal(place: Path, tmp_path: Path) -> None:
    seen = on_a_terminal(lambda: command_line("run", place / "tiny.toml", "--out", tmp_path / "run"))
    assert "━" in seen
    assert re.search(r"rounds  balanced accuracy 0\.\d{3}", seen)
    assert "2/2" in seen
    assert re.search(r"\d:\d\d:\d\d", seen), "the time left"
    assert "round 1/2 " not in seen
    assert "\x1b[?25h" in seen, "the cursor is back"
    table = [line for line in re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", seen).splitlines() if "│" in line]
    assert max(map(len, table)) <= 80
    assert not any("…" in line for line in table)


def test_a_comparison_draws_a_bar_on_a_terminal(place: Path, tmp_path: Path) -> None:
    seen = on_a_terminal(
        lambda: command_line(
            "compare", place / "tiny.toml", "--methods", "isolated,fedavg", "--out", tmp_path / "c", "--no-skew"
        )
    )
    assert "━" in seen
    assert re.search(r"(isolated|fedavg), seed 3 ", seen)
    assert "4/4" in seen
    assert re.search(r"\[2/2\] (isolated|fedavg), seed 3: done", seen)


def test_nothing_is_set_up_for_a_configuration_that_is_wrong(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("too early")

    monkeypatch.setattr(engine, "set_up", fail)
    said = refused("run", place / "tiny.toml", "--out", place / "never", "--set", "training.lr=-1")
    assert said == f"wardround: {place}/tiny.toml: training.lr: expected a number above 0, found -1"
    assert not (place / "never").exists()
