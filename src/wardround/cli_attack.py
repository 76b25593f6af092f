"""The command `attack`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from wardround.cli_base import AsJson, command, names_in, out_console, say, tell
from wardround.errors import InputError


@command("attack", "stopped; attacks on runs that were finished are kept, and the same command goes on")
def attack_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="of a run or a comparison")],
    epsilon: Annotated[str, typer.Option(help="comma-separated, in levels of 255")] = "1,2,4,8",
    clients: Annotated[str, typer.Option(help="comma-separated; by default all that have test images")] = "",
    max_images: Annotated[int | None, typer.Option(min=1, help="of each client; by default all test images")] = None,
    model: Annotated[Literal["personal", "server"], typer.Option(help="which of each client's models")] = "personal",
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="by default attack.json in the folder")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how finished runs bear a fast-gradient-sign attack, and random noise of the same size.

    A comparison gets attack.md beside the figures. Finished attacks with the same options are kept.
    """
    epsilons, chosen = tuple(map(_level, names_in(epsilon))), tuple(names_in(clients)) or None
    from wardround.attacking import ATTACK, Attack, Settings, attack_comparison, attack_run, is_run, over_runs
    from wardround.display import print_tables
    from wardround.federation.files import write_atomically
    from wardround.report.attack_page import attack_markdown, attack_tables, unmoved

    settings = Settings(epsilons, chosen, max_images, model)
    attack, file = Attack(settings, tell), out or folder / ATTACK
    single = is_run(folder)
    record = attack_run(folder, attack, file) if single else attack_comparison(folder, attack, file)
    systems = {record["label"]: over_runs([record], settings)} if single else record["systems"]
    page = file.with_suffix(".md")
    if not single:
        typed = shlex.join(["wardround", *sys.argv[1:]])
        write_atomically(page, attack_markdown(systems, settings, typed).encode(), durable=False)
    if as_json:
        print(json.dumps(record))
        return
    print_tables(out_console, attack_tables(systems, settings))
    for note in unmoved(systems):
        say(f"- {note}")
    say(f"written: {file}" + ("" if single else f" and {page}"))


def _level(word: str) -> float:
    """One number of `--epsilon`."""
    try:
        return float(word)
    except ValueError as error:
        raise InputError(f"--epsilon {word}: expected levels from 0 to 255, as 1,2,4,8") from error
