"""The command line: each command parses, calls one library function, and prints.

Exit status: 0 done, 1 failed while running, 2 the input is wrong, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import functools
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wardround.cli_base import (
    AsJson,
    ExperimentFile,
    Overrides,
    Workers,
    app,
    command,
    deploy,
    err_console,
    flower,
    load,
    names_in,
    out_console,
    say,
    show_records,
    tell,
)  # fmt: skip
from wardround.errors import InputError, RunError

if TYPE_CHECKING:
    from wardround.config import Experiment
    from wardround.data.findings import DataReport
    from wardround.deploy.hospital import Hospital


@command("run", "stopped; what is finished is kept, and the same command with --resume goes on")
def run_command(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="the run's folder; by default runs/<name>-<method>")] = None,
    workers: Workers = None,
    transport: Annotated[
        Literal["local", "flower"] | None, typer.Option(help="what carries the messages; by default as the file says")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on after the last checkpoint, also with more rounds")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train one federation with one method."""
    config = load(experiment, [*(overrides or []), *([f"transport.name={transport}"] if transport else [])])
    from wardround.display import RunDisplay
    from wardround.experiment import run
    from wardround.report.page import write_report

    folder = out or Path("runs") / f"{experiment.stem}-{config.method['name']}"
    display = RunDisplay(err_console, config.rounds)
    tell("reading images, building the model")
    try:
        results = run(config, folder, resume=resume, workers=workers, observers=[display])
    finally:
        display.close()
    page = write_report(folder)
    if as_json:
        print(json.dumps(results))
        return
    _show_results([results])
    _say_traffic(results)
    _say_notes(folder, results["warnings"])
    say(f"report: {page}")


@command("compare", "stopped; what is finished is kept, and the same command goes on")
def compare_command(
    experiment: ExperimentFile,
    methods: Annotated[
        str, typer.Option(help="comma-separated methods, presets or variants, each with any number of :key=value")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="how many seeds, from the experiment's own upwards")] = 1,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="the folder; by default runs/<name>-compare")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="runs at once; by default one a core")] = None,
    reference: Annotated[str | None, typer.Option(help="compare the others with this one; by default the best")] = None,
    skew: Annotated[bool, typer.Option(help="measure first how the clients differ")] = True,
    as_json: AsJson = False,
) -> None:
    """Train several methods over several seeds and say whether their differences are more than noise.

    Finished runs in the folder are kept; interrupted ones go on.
    """
    config = load(experiment, overrides)
    from wardround.comparing import compare
    from wardround.display import CompareDisplay
    from wardround.systems import systems_named

    systems = systems_named(config, names_in(methods))
    folder = out or Path("runs") / f"{experiment.stem}-compare"
    before = functools.partial(_measure_once, config, folder / "skew") if skew else None
    display = CompareDisplay(err_console)
    tell("reading images, building the models")
    failure = None
    try:
        chosen = range(config.seed, config.seed + seeds)
        compare(systems, chosen, folder, display, workers, reference, before, shlex.join(["wardround", *sys.argv[1:]]))
    except RunError as error:
        failure = error
    finally:
        display.close()
    _tell_comparison(folder, [system.folder_name for system in systems], as_json)
    if failure:
        raise failure


@command("tune", "stopped; what is finished is kept, and the same command goes on")
def tune_command(
    experiment: ExperimentFile,
    methods: Annotated[str, typer.Option(help="comma-separated methods, presets or variants")],
    search: Annotated[
        Literal["grid", "random"], typer.Option(help="every combination of [tune], or a draw of --budget")
    ] = "grid",
    budget: Annotated[
        int | None, typer.Option(min=1, help="trials of each method; by default the size of the largest grid")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="of each trial; by default the experiment's own")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each trial, from the experiment's seed upwards")] = 1,
    criterion: Annotated[
        Literal["unweighted", "weighted"], typer.Option(help="mean over clients of validation balanced accuracy")
    ] = "unweighted",
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="the folder; by default runs/<name>-tune")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="runs at once; by default one a core")] = None,
    as_json: AsJson = False,
) -> None:
    """Search every method's settings on validation images, with an equal budget, and write tuned.toml for `compare`.

    Finished trials in the folder are kept; interrupted ones go on.
    """
    config = load(experiment, overrides)
    from wardround.display import CompareDisplay
    from wardround.search_plan import Search
    from wardround.tuning import TUNED, tune

    folder = out or Path("runs") / f"{experiment.stem}-tune"
    display = CompareDisplay(err_console)
    tell("reading images, building the models")
    try:
        record = tune(
            config, names_in(methods), folder, display, Search(search, budget, seeds, rounds, criterion), workers
        )
    finally:
        display.close()
    if as_json:
        print(json.dumps(record))
        return
    _show_tuning(record)
    say(f"written: {folder / TUNED}; `wardround compare` it with --methods {','.join(record['methods'])}")


@command("skew")
def skew_command(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="EXPERIMENT.toml | FOLDER...", help="the experiment file; or runs or comparisons"),
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="by default runs/<name>-skew, or <FOLDER>/skew of a single folder")
    ] = None,
    estimator: Annotated[Literal["biased", "unbiased"], typer.Option(help="of the MMD")] = "biased",
    squared: Annotated[bool, typer.Option("--squared", help="report MMD squared")] = False,
    bandwidth: Annotated[Literal["global", "pair"], typer.Option(help="one for all pairs, or one a pair")] = "global",
    permutations: Annotated[int, typer.Option(min=1, help="of each two-sample test before training")] = 500,
    max_images: Annotated[int, typer.Option(min=2, help="of each client")] = 500,
    model: Annotated[
        Literal["personal", "server"], typer.Option(help="of runs: which of each client's models")
    ] = "personal",
    as_json: AsJson = False,
) -> None:
    """Say how the clients differ before any training, and which methods to try first.

    Given folders of finished runs or comparisons: how far apart the clients' features are by the trained networks,
    beside the network before training, on the same test images.
    """
    choices = {"estimator": estimator, "squared": squared, "bandwidth": bandwidth}
    if any(source.is_dir() for source in sources):
        _trained_skew(sources, overrides, out, model, max_images, choices, as_json)
        return
    experiment, *more = sources
    if more:
        raise InputError(f"{more[0]}: one experiment file at a time; only folders of runs can be several")
    config = load(experiment, overrides)
    sizes = {"permutations": permutations, "max_images": max_images}
    folder = out or Path("runs") / f"{experiment.stem}-skew"
    found = _measure(config, folder, **choices, **sizes)
    if as_json:
        print(json.dumps(found))
        return
    from wardround.skew.analyse import skew_text

    out_console.print(skew_text(found))
    say(f"written to {folder / 'skew.json'}")


def _trained_skew(
    sources: list[Path],
    overrides: list[str] | None,
    out: Path | None,
    model: Literal["personal", "server"],
    max_images: int,
    choices: dict[str, Any],
    as_json: bool,
) -> None:
    """The part of `skew` for finished runs: measure, write, draw, print."""
    if overrides:
        raise InputError("--set: finished runs are measured as they were; it goes with an experiment file only")
    from wardround.measuring_trained import measure_trained
    from wardround.report.pictures import save_trained
    from wardround.run_folder import write_json
    from wardround.skew.mmd import Variant
    from wardround.skew.trained import trained_text

    folder = out or (sources[0] / "skew" if len(sources) == 1 else Path("runs") / f"{sources[0].name}-skew")
    tell("computing features of the trained networks")
    found = measure_trained(sources, which=model, max_images=max_images, variant=Variant(**choices))
    write_json(folder / "trained.json", found)
    save_trained(folder / "trained.png", found)
    if as_json:
        print(json.dumps(found))
        return
    out_console.print(trained_text(found))
    say(f"written to {folder / 'trained.json'} and {folder / 'trained.png'}")


@command("report")
def report_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="of a run or a comparison")],
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE.md", help="write the tables there instead, as Markdown")
    ] = None,
) -> None:
    """Write FOLDER/report.html anew, or its tables as Markdown."""
    if markdown is not None:
        from wardround.report.markdown import write_markdown

        say(write_markdown(folder, markdown))
        return
    from wardround.report.page import write_report

    say(write_report(folder))


@command("predict")
def predict_command(
    source: Annotated[Path, typer.Argument(metavar="FOLDER", help="of a run; or a file that `export` wrote")],
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGE...", help="image files; a .csv file with the column image names more")
    ],
    client: Annotated[str | None, typer.Option(help="whose model; a file has only one")] = None,
    model: Annotated[Literal["personal", "server"], typer.Option(help="which of the client's models")] = "personal",
    modality: Annotated[
        str, typer.Option(help="of the images, where predictions depend on it and no column modality says more")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Classify new images with one client's model."""
    from wardround.using import load_exported, load_trained, predict

    trained = load_exported(source) if source.is_file() else load_trained(source, client, model)
    found = predict(trained, images, modality)
    if as_json:
        print(json.dumps(found))
        return
    for entry in found:
        ranked = sorted(entry["probabilities"].items(), key=lambda item: -item[1])
        shown = "  ".join(f"{name} {probability:.3f}" for name, probability in ranked[:5])
        say(f"{entry['image']}: {shown}{_modality_in(entry)}")


def _modality_in(entry: dict[str, Any]) -> str:
    """Of which modality an image was taken to be, where that matters."""
    if "modality" not in entry:
        return ""
    name, how = (entry["modality"][key] for key in ("name", "how"))
    return f"  ({name}, {how})" if name else f"  (modality unknown: {how})"


@command("export")
def export_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="of a run")],
    client: Annotated[str, typer.Option(help="whose model")],
    to: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="the file to write")],
    model: Annotated[Literal["personal", "server"], typer.Option(help="which of the client's models")] = "personal",
) -> None:
    """Write one client's model to a safetensors file."""
    from wardround.using import export, load_trained

    export(load_trained(folder, client, model), to)
    say(to)


@command("build", of=flower)
def flower_build_command(
    experiment: ExperimentFile,
    out: Annotated[Path, typer.Option(metavar="APP", help="the app's folder; new or empty")],
    overrides: Overrides = None,
    run: Annotated[Path | None, typer.Option(help="the run's folder; by default runs/<name>-flower")] = None,
) -> None:
    """Write the experiment as a Flower app, to be inspected, signed and run with Flower's own commands."""
    config = load(experiment, overrides)
    from wardround.flower_app import build_app

    clients = build_app(config, out, experiment.stem, run or Path("runs") / f"{experiment.stem}-flower")
    say(f"written: {out}, for {clients} nodes; run it with: flwr run {out} --stream")


@command("init", of=deploy)
def deploy_init_command(
    experiment: ExperimentFile = Path("experiment.toml"),
    clients: Annotated[str, typer.Option(help="comma-separated names; by default the sites of the data")] = "",
    classes: Annotated[str, typer.Option(help="comma-separated names; by default those of the data")] = "",
    host: Annotated[str, typer.Option(help="name or address under which clients reach the server")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 9443,
    min_count: Annotated[int, typer.Option(min=0, help="clients tell nothing that sums up fewer images")] = 20,
    as_it_is: Annotated[
        bool, typer.Option("--as-it-is", help="keep the method's keys, also where others say less of single images")
    ] = False,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="the folder of all folders; new or empty")] = Path("deploy"),
) -> None:
    """Make certificates, keys, and one folder to hand to each side."""
    config = load(experiment, overrides)
    from wardround.federation.flower_setup import need_flower

    need_flower()
    from wardround.deploy.founding import Plan, found
    from wardround.deploy.settings import ServerSettings, is_loopback

    settings = ServerSettings(host=host, port=port, listen=host if is_loopback(host) else "0.0.0.0")
    plan = Plan(config, names_in(clients), names_in(classes), settings, min_count, as_it_is)
    server, *handed = found(plan, out)
    say(f"{server}: for the server; start it with: wardround deploy server {server}")
    for folder in handed:
        say(f"{folder}: to hand over, by a safe way; start it there with: wardround deploy client {folder.name}")
    say(f"{out / 'authority'}: signs certificates; keep it off the server, and give it to nobody")


ServerFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="of the server, as `deploy init` made it")]
Insecure = Annotated[bool, typer.Option("--insecure", help="plain text instead of TLS; on this machine alone")]


@command("server", "stopped; what is finished is kept, and the same command goes on", of=deploy)
def deploy_server_command(folder: ServerFolder = Path(), insecure: Insecure = False, as_json: AsJson = False) -> None:
    """Run the experiment with the clients that come, or go on with it."""
    from wardround.federation.flower_setup import need_flower

    need_flower()
    from wardround.deploy.serving import serve
    from wardround.deploy.settings import RUN
    from wardround.deploy.telling import telling
    from wardround.report.page import write_report

    _stop_at_sigterm()
    results = serve(folder, insecure, telling(folder / "server.log"))
    page = write_report(folder / RUN)
    if as_json:
        print(json.dumps(results))
        return
    _show_results([results])
    _say_traffic(results)
    _say_notes(folder / RUN, results["warnings"])
    say(f"report: {page}")


@command("client", "stopped; the same command goes on", of=deploy)
def deploy_client_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="of the client, as `deploy init` made it")] = Path(),
    data: Annotated[Path | None, typer.Option(help="where the images are; by default as client.toml says")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="connect to nobody; print what would leave")] = False,
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="of a dry run: print JSON instead of text")] = False,
) -> None:
    """Take part with this hospital's images, until the federation is finished."""
    from wardround.federation.flower_setup import need_flower

    untested = need_flower()
    from wardround.deploy.attending import attend, credentials
    from wardround.deploy.hospital import open_hospital, read_settings
    from wardround.deploy.telling import telling

    _stop_at_sigterm()
    credentials(folder, read_settings(folder), insecure)  # what is wrong there shows before the long work
    tell("reading and checking the images, building the model")
    hospital = open_hospital(folder, data)
    if dry_run:
        _show_departures(hospital, as_json)
        return
    log = telling(folder / "client.log")
    if untested:
        log(untested)
    attend(hospital, insecure, log)


@command("status", of=deploy)
def deploy_status_command(folder: ServerFolder = Path(), as_json: AsJson = False) -> None:
    """Say who is connected, the round, and the last word from each."""
    from wardround.deploy.status import read_status, status_text

    board = read_status(folder)
    if as_json:
        print(json.dumps(board))
        return
    say(status_text(board))


@command("renew", of=deploy)
def deploy_renew_command(
    folder: ServerFolder,
    authority: Annotated[Path, typer.Option(metavar="FOLDER", help="the folder `authority` of `deploy init`")],
) -> None:
    """Give a server a new certificate; clients need nothing new."""
    from wardround.deploy.founding import renew

    renew(folder, authority)
    say(f"{folder / 'server.pem'}: renewed; start the server again")


@command("methods")
def methods_command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="show this method's keys")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, with citations; or one method's keys."""
    from wardround.methods.describing import describe_method, describe_methods

    if name is None:
        show_records(describe_methods(), as_json, hide="preset")
        return
    one = describe_method(name)
    if as_json:
        print(json.dumps(one))
        return
    from rich.markdown import Markdown

    from wardround import listing

    out_console.print(f"[bold]{one['name']}[/bold]", one["title"], "", sep="\n", highlight=False)
    out_console.print(Markdown(one["text"]), "", one["citation"], sep="\n", markup=False, highlight=False)
    if one["keys"]:
        out_console.print("", listing.keys(one["keys"]), sep="\n")


@command("datasets")
def datasets_command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="only those whose name contains this")] = None,
    as_json: AsJson = False,
) -> None:
    """List the data sets that can be read by name, with citations."""
    from dataclasses import asdict

    from wardround.data.sources import all_datasets

    show_records(_containing(name, [asdict(entry) for entry in all_datasets()]), as_json)


@command("backbones")
def backbones_command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="only those whose name contains this")] = None,
    as_json: AsJson = False,
) -> None:
    """List the networks that can be trained, with citations."""
    from dataclasses import asdict

    from wardround.models.catalogue import BACKBONES

    listed = [asdict(entry) | {"citation": entry.citation} for entry in BACKBONES]
    show_records(_containing(name, listed), as_json)


@command("keys")
def keys_command(
    section: Annotated[
        str | None, typer.Argument(metavar="SECTION", help="only this section, such as training or data.phantoms")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the keys of an experiment file: default, meaning, what is allowed."""
    from wardround.config import experiment_keys

    described = experiment_keys(section)
    if as_json:
        print(json.dumps(described))
        return
    from wardround import listing

    out_console.print(listing.keys(described))
    if section is None:
        say("The keys of [method] depend on its name: `wardround methods NAME`.")


@command("check-data")
def check_data_command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="a table, a folder site/class/image, an .npz file; or an experiment file that says how to read",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Say everything that is wrong with a table or folder of images. Status 2 when it is not fit for use."""
    from wardround.data.checking import check_data

    report = _check_experiment(path) if path.suffix == ".toml" else check_data(path)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        say(report.render())
    if not report.fit:
        raise typer.Exit(2)


def _check_experiment(file: Path) -> DataReport:
    """Check the images of an experiment file, with its columns, sites and splits."""
    from wardround.data.checking import check_data

    data = load(file, None).data
    if data.path is None:
        raise InputError(f"{file}: data.path is not set, so there are no files to check")
    return check_data(Path(data.path), data)


@app.callback(invoke_without_command=True)
def _about(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        from wardround import __version__

        print(__version__)
        raise typer.Exit


def _stop_at_sigterm() -> None:
    """End as at Ctrl-C when the system asks for it."""
    import signal

    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _show_departures(hospital: Hospital, as_json: bool) -> None:
    """All that a client would send."""
    from wardround.deploy.departures import departures, departures_text

    if as_json:
        print(json.dumps(departures(hospital)))
        return
    say(departures_text(hospital))


def _measure(config: Experiment, folder: Path, **choices: Any) -> dict[str, Any]:
    """Measure skew and write `skew.json`."""
    from wardround.data.read import read_federation
    from wardround.measuring import measure_skew
    from wardround.run_folder import write_json

    found = measure_skew(config, read_federation(config.data, config.seed), **choices)
    write_json(folder / "skew.json", found)
    return found


def _measure_once(config: Experiment, folder: Path) -> None:
    if not (folder / "skew.json").exists():
        tell("measuring how the clients differ")
        _measure(config, folder)


def _tell_comparison(folder: Path, names: list[str], as_json: bool) -> None:
    """What the finished systems say, also when others failed; nothing while there is no comparison."""
    from wardround.comparing import COMPARISON
    from wardround.report.page import write_report

    if not (folder / COMPARISON).exists():
        return
    page = write_report(folder)
    comparison = json.loads((folder / COMPARISON).read_text(encoding="utf-8"))
    if as_json:
        print(json.dumps(comparison))
        return
    files = [folder / name / "results.json" for name in names]
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    _show_results(results)
    _say_findings(comparison)
    _say_notes(folder, sorted({warning for result in results for warning in result["warnings"]}))
    say(f"report: {page}")


def _show_results(results: list[dict[str, Any]]) -> None:
    """The table of the clients' own models and, of methods that have one, that of the server's model."""
    from wardround.display import print_tables
    from wardround.evaluation.tables import results_table

    served = [result for result in results if result["global"]]
    print_tables(out_console, [results_table(results), *([results_table(served, model="global")] if served else [])])


def _show_tuning(record: dict[str, Any]) -> None:
    """Every method's best values, and what to know of them."""
    from wardround.display import tuning_table

    out_console.print(tuning_table(record))
    for note in record["notes"]:
        err_console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def _say_findings(comparison: dict[str, Any]) -> None:
    for pair in comparison["pairs"]:
        say(f"- {pair['sentence']}")
    smallest = comparison["smallest_difference"]["unweighted_average"]
    if smallest is not None:
        say(f"Smallest difference of the unweighted mean that this test set can show: {smallest:.3f}")


def _say_traffic(results: dict[str, Any]) -> None:
    traffic = results["communication"]
    up, down = (traffic[key] / 1e6 for key in ("bytes_up", "bytes_down"))
    say(f"communication: {up:.1f} MB up, {down:.1f} MB down in {results['rounds']} rounds")


def _say_notes(folder: Path, warnings: list[str], most: int = 10) -> None:
    """What was found odd about the data, and what to beware of in the results."""
    roster = json.loads((folder / "federation.json").read_text(encoding="utf-8"))
    more = [f"and {len(warnings) - most} more in results.json"] if len(warnings) > most else []
    lines = [f"note: {note}" for note in roster["notes"]]
    lines += [f"warning: {warning}" for warning in [*warnings[:most], *more]]
    for line in lines:
        style = "yellow" if line.startswith("warning") else None
        err_console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _containing(name: str | None, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [record for record in records if name is None or name.lower() in record["name"].lower()]
    if not found:
        raise InputError(f"nothing here has {name!r} in its name; without a NAME all are listed")
    return found


def main() -> None:
    """Entry point of the command `wardround`."""
    sys.exit(app())


from wardround import cli_attack, cli_embed, cli_studies, cli_unseen  # noqa: E402, F401 - after the commands that help lists first
