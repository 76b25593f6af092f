"""What all commands share: the program, options that many take, errors as exit statuses, and what is printed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.console import Console

from wardround.errors import InputError, RunError

if TYPE_CHECKING:
    from wardround.config import Experiment

P = ParamSpec("P")

app = typer.Typer(
    help="Personalised federated learning for medical images: one model per hospital, trained with the help of all.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
flower = typer.Typer(help="Federations over Flower (pip install 'wardround\\[flower]').", no_args_is_help=True)
app.add_typer(flower, name="flower")
deploy = typer.Typer(
    help="A federation of real hospitals, over TLS (pip install 'wardround\\[flower]').", no_args_is_help=True
)
app.add_typer(deploy, name="deploy")
out_console, err_console = Console(), Console(stderr=True)

ExperimentFile = Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="the experiment file")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a key, as training.lr=0.1; repeatable")
]
Workers = Annotated[int | None, typer.Option(min=1, help="worker processes; by default one a core")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]


def command(
    name: str, interrupted: str = "stopped", of: typer.Typer = app
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Register a command whose errors become messages and exit statuses; `interrupted` is said at Ctrl-C."""

    def register(function: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                function(*args, **kwargs)
            except InputError as error:
                _stop(str(error), 2)
            except RunError as error:
                _stop(str(error), 1)
            except BrokenPipeError:  # whoever read our output has gone; click ends quietly
                raise
            except OSError as error:
                _stop(f"{error.filename or 'system'}: {error.strerror or error}", 1)
            except KeyboardInterrupt:
                _stop(interrupted, 130)

        of.command(name)(guarded)
        return guarded

    return register


def _stop(text: str, status: int) -> None:
    err_console.print(f"wardround: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(status)


def say(text: object) -> None:
    """A line for whoever reads the results, as it is: no markup, no line breaks of ours."""
    out_console.print(str(text), markup=False, highlight=False, soft_wrap=True)


def tell(text: str) -> None:
    """A line for whoever waits."""
    err_console.print(f"{text} ...", style="dim", markup=False, highlight=False, soft_wrap=True)


def names_in(text: str) -> list[str]:
    """The entries of a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def load(file: Path, overrides: list[str] | None) -> Experiment:
    """The experiment in a file, with `overrides` as `--set` takes them."""
    from wardround.config import load_experiment

    return load_experiment(file, overrides or [])


def show_records(records: list[dict[str, Any]], as_json: bool, hide: str = "") -> None:
    """A table of records without the key `hide`, or all of them as JSON."""
    if as_json:
        print(json.dumps(records))
        return
    from wardround import listing

    out_console.print(listing.records([{k: v for k, v in record.items() if k != hide} for record in records]))
