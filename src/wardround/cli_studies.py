"""The commands `study` and `studies`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from wardround.cli_base import (
    AsJson,
    ExperimentFile,
    Overrides,
    command,
    err_console,
    load,
    names_in,
    out_console,
    say,
    show_records,
    tell,
)
from wardround.errors import InputError, RunError


@command("study", "stopped; what is finished is kept, and the same command goes on")
def study_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="of the study; see `wardround studies`")],
    experiment: ExperimentFile,
    methods: Annotated[
        str, typer.Option(help="for a study without systems of its own: as `compare` takes them; by default the file's")
    ] = "",
    clients: Annotated[str, typer.Option(help="numbers of clients, as 5,10,15, for a study that varies them")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="how many seeds, from the experiment's own upwards")] = 1,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="the folder; by default runs/<name>-<study>")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="runs at once; by default one a core")] = None,
    without_held_out: Annotated[
        bool, typer.Option("--without-held-out", help="go without images that never train, where the study wants some")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a declared set of systems around an experiment, and write one table over them.

    Finished runs in the folder are kept; interrupted ones go on.
    """
    config = load(experiment, overrides)
    from wardround.display import CompareDisplay
    from wardround.studies import study_named
    from wardround.studying import STUDY, check_held_out, plan_study, run_study

    study = study_named(name)
    study = study.with_clients(_numbers(clients)) if clients else study
    folder = out or Path("runs") / f"{experiment.stem}-{study.name}"
    if not without_held_out:
        check_held_out(study, config)
    legs = plan_study(study, config, folder, names_in(methods))
    display = CompareDisplay(err_console)
    tell("reading images, building the models")
    failure = None
    try:
        chosen = range(config.seed, config.seed + seeds)
        run_study(study, legs, chosen, folder, display, workers, shlex.join(["wardround", *sys.argv[1:]]))
    except RunError as error:
        failure = error
    finally:
        display.close()
    _show(json.loads((folder / STUDY).read_text(encoding="utf-8")), folder, as_json)
    if failure:
        raise failure


def _numbers(text: str) -> list[int]:
    """The numbers of clients in a list with commas, in order and each once."""
    words = names_in(text)
    wrong = [word for word in words if not word.isdecimal() or int(word) < 1]
    if wrong or not words:
        raise InputError(
            f"--clients: expected whole numbers from 1 up, as 5,10,15, found {wrong[0] if wrong else text!r}"
        )
    return list(dict.fromkeys(map(int, words)))


def _show(record: dict[str, Any], folder: Path, as_json: bool) -> None:
    """The study's tables, and where its page is."""
    if as_json:
        print(json.dumps(record))
        return
    from wardround.display import print_tables
    from wardround.report.study_page import sentences, study_tables
    from wardround.studying import PAGE

    for table in study_tables(record):
        print_tables(out_console, [table])
    for sentence in sentences(record):
        say(f"- {sentence}")
    say(f"written: {folder / PAGE}")


@command("studies")
def studies_command(as_json: AsJson = False) -> None:
    """List the studies: what each asks, where it is from, and what it runs."""
    from wardround.studies import describe_studies

    show_records(describe_studies(), as_json)
