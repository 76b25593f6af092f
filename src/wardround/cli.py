"""The command line: each command parses, calls one library function, and prints.

Exit status: 0 done, 1 failed while running, 2 the input is wrong, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

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
out_console, err_console = Console(), Console(stderr=True)

ExperimentFile = Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="the experiment file")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a key, as training.lr=0.1; repeatable")
]
Workers = Annotated[int | None, typer.Option(min=1, help="worker processes; by default one a core")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]


def command(name: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Register a command whose errors become messages and exit statuses."""

    def register(function: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                function(*args, **kwargs)
            except InputError as error:
                _stop(str(error), 2)
            except RunError as error:
                _stop(str(error), 1)
            except KeyboardInterrupt:
                _stop("stopped; what is finished is kept: the same command (for `run` with --resume) goes on", 130)

        app.command(name)(guarded)
        return guarded

    return register


def _stop(text: str, status: int) -> None:
    err_console.print(f"wardround: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(status)


@command("run")
def run_command(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="the run's folder; by default runs/<name>-<method>")] = None,
    workers: Workers = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on after the last checkpoint")] = False,
    as_json: AsJson = False,
) -> None:
    """Train one federation with one method."""
    config = _load(experiment, overrides)
    from wardround.display import RunDisplay
    from wardround.evaluation.tables import results_table, to_rich
    from wardround.experiment import run
    from wardround.report.page import write_report

    folder = out or Path("runs") / f"{experiment.stem}-{config.method['name']}"
    display = RunDisplay(err_console, config.rounds)
    try:
        results = run(config, folder, resume=resume, workers=workers, observers=[display])
    finally:
        display.close()
    page = write_report(folder)
    if as_json:
        print(json.dumps(results))
        return
    out_console.print(to_rich(results_table([results])))
    _say_traffic(results)
    _warn(results["warnings"])
    out_console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)


@command("compare")
def compare_command(
    experiment: ExperimentFile,
    methods: Annotated[str, typer.Option(help="comma-separated methods, presets or variants, each with :key=value")],
    seeds: Annotated[int, typer.Option(min=1, help="how many seeds, from the experiment's own upwards")] = 1,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="the folder; by default runs/<name>-compare")] = None,
    workers: Workers = None,
    reference: Annotated[str | None, typer.Option(help="compare the others with this one; by default the best")] = None,
    skew: Annotated[bool, typer.Option(help="measure first how the clients differ")] = True,
    as_json: AsJson = False,
) -> None:
    """Train several methods over several seeds and say whether their differences are more than noise.

    Finished runs in the folder are kept; interrupted ones go on.
    """
    config = _load(experiment, overrides)
    from wardround.comparing import compare, systems_named
    from wardround.display import CompareDisplay
    from wardround.report.page import write_report

    systems = systems_named(config, [name.strip() for name in methods.split(",") if name.strip()])
    folder = out or Path("runs") / f"{experiment.stem}-compare"
    if skew and not (folder / "skew" / "skew.json").exists():
        _measure(config, folder / "skew")
    display = CompareDisplay(err_console)
    every = range(config.seed, config.seed + seeds)
    try:
        comparison = compare(systems, every, folder, display, workers, reference)
    finally:
        display.close()
    page = write_report(folder)
    if as_json:
        print(json.dumps(comparison))
        return
    _print_comparison(folder, [system.folder_name for system in systems], comparison)
    out_console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)


@command("skew")
def skew_command(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="the folder; by default runs/<name>-skew")] = None,
    estimator: Annotated[Literal["biased", "unbiased"], typer.Option(help="of the MMD")] = "biased",
    squared: Annotated[bool, typer.Option(help="report MMD squared")] = False,
    bandwidth: Annotated[Literal["global", "pair"], typer.Option(help="one for all pairs, or one a pair")] = "global",
    permutations: Annotated[int, typer.Option(min=1, help="of each two-sample test")] = 500,
    max_images: Annotated[int, typer.Option(min=2, help="of each client")] = 500,
    as_json: AsJson = False,
) -> None:
    """Say how the clients differ, before any training."""
    config = _load(experiment, overrides)
    choices = {"estimator": estimator, "squared": squared, "bandwidth": bandwidth}
    sizes = {"permutations": permutations, "max_images": max_images}
    folder = out or Path("runs") / f"{experiment.stem}-skew"
    found = _measure(config, folder, **choices, **sizes)
    from wardround.skew.analyse import skew_text

    print(json.dumps(found)) if as_json else out_console.print(skew_text(found), f"written to {folder}/skew.json")


@command("report")
def report_command(folder: Annotated[Path, typer.Argument(help="of a run or a comparison")]) -> None:
    """Write FOLDER/report.html anew."""
    from wardround.report.page import write_report

    out_console.print(str(write_report(folder)), markup=False, highlight=False, soft_wrap=True)


@command("predict")
def predict_command(
    folder: Annotated[Path, typer.Argument(help="of a run")],
    images: Annotated[list[Path], typer.Argument(help="image files")],
    client: Annotated[str, typer.Option(help="whose model")],
    model: Annotated[Literal["personal", "server"], typer.Option(help="which of its models")] = "personal",
    as_json: AsJson = False,
) -> None:
    """Classify new images with one client's model."""
    from wardround.using import load_trained, predict

    found = predict(load_trained(folder, client, model), images)
    if as_json:
        print(json.dumps(found))
        return
    for entry in found:
        ranked = sorted(entry["probabilities"].items(), key=lambda item: -item[1])
        shown = "  ".join(f"{name} {probability:.3f}" for name, probability in ranked[:5])
        out_console.print(f"{entry['image']}: {shown}", markup=False, highlight=False, soft_wrap=True)


@command("export")
def export_command(
    folder: Annotated[Path, typer.Argument(help="of a run")],
    client: Annotated[str, typer.Option(help="whose model")],
    to: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="the file to write")],
    model: Annotated[Literal["personal", "server"], typer.Option(help="which of its models")] = "personal",
) -> None:
    """Write one client's model to a safetensors file."""
    from wardround.using import export, load_trained

    export(load_trained(folder, client, model), to)
    out_console.print(str(to), markup=False, highlight=False, soft_wrap=True)


@command("methods")
def methods_command(
    name: Annotated[str | None, typer.Argument(help="show this method's keys")] = None, as_json: AsJson = False
) -> None:
    """List the methods, with citations; or one method's keys."""
    from wardround.methods.describing import describe_method, describe_methods, method_table, methods_table

    if name is None:
        listed = describe_methods()
        print(json.dumps(listed)) if as_json else out_console.print(methods_table(listed))
        return
    one = describe_method(name)
    print(json.dumps(one)) if as_json else out_console.print(method_table(one))


@command("datasets")
def datasets_command(as_json: AsJson = False) -> None:
    """List the data sets that can be read by name, with citations."""
    from dataclasses import asdict

    from wardround.data.sources import all_datasets

    _print_records([asdict(entry) for entry in all_datasets()], as_json)


@command("backbones")
def backbones_command(as_json: AsJson = False) -> None:
    """List the networks that can be trained, with citations."""
    from dataclasses import asdict

    from wardround.models.catalogue import BACKBONES

    _print_records([asdict(entry) | {"citation": entry.citation} for entry in BACKBONES], as_json)


@command("check-data")
def check_data_command(
    path: Annotated[Path, typer.Argument(help="a table, a folder site/class/image, or an .npz file")],
    as_json: AsJson = False,
) -> None:
    """Say everything that is wrong with a table or folder of images. Status 2 when it is not fit for use."""
    from wardround.data.checking import check_data

    report = check_data(path)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        out_console.print(report.render(), markup=False, highlight=False, soft_wrap=True)
    if not report.fit:
        raise typer.Exit(2)


@app.callback(invoke_without_command=True)
def _about(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        from wardround import __version__

        print(__version__)
        raise typer.Exit


def _load(file: Path, overrides: list[str] | None) -> Experiment:
    from wardround.config import load_experiment

    return load_experiment(file, overrides or [])


def _measure(config: Experiment, folder: Path, **choices: Any) -> dict[str, Any]:
    """Measure skew and write `skew.json`."""
    from wardround.data.read import read_federation
    from wardround.experiment import write_json
    from wardround.measuring import measure_skew

    found = measure_skew(config, read_federation(config.data, config.seed), **choices)
    write_json(folder / "skew.json", found)
    return found


def _print_comparison(folder: Path, names: list[str], comparison: dict[str, Any]) -> None:
    from wardround.evaluation.tables import results_table, to_rich

    results = [json.loads((folder / name / "results.json").read_text()) for name in names]
    out_console.print(to_rich(results_table(results)))
    if any(result["global"] for result in results):
        out_console.print(to_rich(results_table([r for r in results if r["global"]], model="global")))
    for pair in comparison["pairs"]:
        out_console.print(f"- {pair['sentence']}", markup=False, highlight=False)
    smallest = comparison["smallest_difference"]["unweighted"]
    if smallest is not None:
        out_console.print(f"Smallest difference of the unweighted mean that this test set can show: {smallest:.3f}")
    _warn(sorted({warning for result in results for warning in result["warnings"]}))


def _say_traffic(results: dict[str, Any]) -> None:
    traffic = results["communication"]
    up, down = (traffic[key] / 1e6 for key in ("bytes_up", "bytes_down"))
    out_console.print(f"communication: {up:.1f} MB up, {down:.1f} MB down in {results['rounds']} rounds")


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        err_console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _print_records(records: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(records))
        return
    for record in records:
        heading, *rest = record.items()
        out_console.print(str(heading[1]), style="bold", markup=False)
        for key, value in rest:
            if value not in (None, ""):
                text = str(value).replace("\n", "\n    ")
                out_console.print(f"  {key}: {text}", markup=False, highlight=False)


def main() -> None:
    """Entry point of the command `wardround`."""
    sys.exit(app())
