"""The command `unseen-modality`."""

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
    tell,
)
from wardround.errors import RunError


@command("unseen-modality", "stopped; what is finished is kept, and the same command goes on")
def unseen_command(
    experiment: ExperimentFile,
    leave_out: Annotated[str, typer.Option(help="modalities, comma-separated; by default each in turn")] = "",
    methods: Annotated[str, typer.Option(help="as `compare` takes them")] = "fm2,fedavg",
    seeds: Annotated[int, typer.Option(min=1, help="how many seeds, from the experiment's own upwards")] = 3,
    fraction: Annotated[float, typer.Option(help="of the modality's training images that it is learned from")] = 0.05,
    epochs: Annotated[int, typer.Option(help="passes over these")] = 20,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="the folder; by default runs/<name>-unseen-modality")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="runs at once; by default one a core")] = None,
    as_json: AsJson = False,
) -> None:
    """Train without a modality, then learn it from few images: from the federation's networks, and from scratch.

    Finished runs in the folder are kept; interrupted ones go on.
    """
    config = load(experiment, overrides)
    from wardround.display import CompareDisplay
    from wardround.systems import systems_named
    from wardround.unseen_study import UNSEEN, Settings, run_unseen

    folder = out or Path("runs") / f"{experiment.stem}-unseen-modality"
    systems, settings = systems_named(config, names_in(methods)), Settings(fraction, epochs)
    display = CompareDisplay(err_console)
    tell("reading images, building the models")
    failure = None
    try:
        chosen, left_out = range(config.seed, config.seed + seeds), names_in(leave_out)
        typed = shlex.join(["wardround", *sys.argv[1:]])
        run_unseen(systems, chosen, left_out, settings, folder, display, tell, workers, typed)
    except RunError as error:
        failure = error
    finally:
        display.close()
    if (folder / UNSEEN).exists():
        _show(json.loads((folder / UNSEEN).read_text(encoding="utf-8")), folder, as_json)
    if failure:
        raise failure


def _show(record: dict[str, Any], folder: Path, as_json: bool) -> None:
    """The tables, and where their page is."""
    if as_json:
        print(json.dumps(record))
        return
    from wardround.display import print_tables
    from wardround.report.unseen_page import unseen_tables
    from wardround.unseen_study import PAGE

    for table in unseen_tables(record):
        print_tables(out_console, [table])
    say(f"written: {folder / PAGE}")
