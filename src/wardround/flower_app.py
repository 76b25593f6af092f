"""An experiment as a Flower app: a folder that others can inspect, sign, and run with Flower's own commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from wardround import __version__
from wardround.config import Experiment, load_experiment
from wardround.data.read import read_federation
from wardround.errors import InputError
from wardround.experiment import Setup, begin_journals, run
from wardround.federation.checkpoints import Checkpoint
from wardround.federation.codecs import codec_named
from wardround.federation.files import write_atomically
from wardround.federation.flower_setup import need_flower
from wardround.federation.transport import Transport

if TYPE_CHECKING:
    from flwr.serverapp import Grid, ServerApp

ROLL_SECONDS = 300.0  # until all clients must have said who they are
PACKAGE, EXPERIMENT = "app", "experiment.toml"
SERVER = '''"""The server of this app: the experiment's round loop, over Flower's grid."""

from pathlib import Path

from wardround.flower_app import server_app

app = server_app(Path(__file__).with_name("experiment.toml"))
'''
CLIENT = '''"""The clients of this app: they answer the server's messages with their own images."""

from wardround.flower_client import client_app

app = client_app()
'''
README = """# {name}

A Flower app around an experiment of Wardround {version}. Everything that decides its numbers is in
`{package}/{experiment}`. The package `wardround[flower]` must be installed wherever it runs.

    flwr federation simulation-config @none/default local --num-supernodes {clients}     # once: a node for each client
    flwr run . --stream

`out` in `pyproject.toml` is the run's folder. A second run with the same `out` goes on where the first one stopped.
"""


def build_app(experiment: Experiment, folder: Path, name: str, out: Path) -> int:
    """Write a Flower app into `folder`, for a federation whose images can be read here.

    Args:
        experiment: checked already.
        folder: new or empty.
        name: of the app.
        out: the folder of its run.

    Returns:
        How many clients it has, hence nodes it needs.

    Raises:
        InputError: `folder` holds something, or the images cannot be read.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder}: is not empty; give another --out")
    clients = len(read_federation(experiment.data, experiment.seed).names)
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "experiment"
    project = {
        "project": {
            "name": plain,
            "version": "1.0.0",
            "description": f"{experiment.method['name']} on {experiment.data.source}",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "wardround",
                    "components": {"serverapp": f"{PACKAGE}.server:app", "clientapp": f"{PACKAGE}.client:app"},
                    "config": {"out": str(out.resolve())},
                }
            }
        },
    }
    files = {
        "pyproject.toml": tomli_w.dumps(project),
        "README.md": README.format(
            name=plain, version=__version__, package=PACKAGE, experiment=EXPERIMENT, clients=clients
        ),
        f"{PACKAGE}/__init__.py": '"""An experiment of Wardround as a Flower app."""\n',
        f"{PACKAGE}/server.py": SERVER,
        f"{PACKAGE}/client.py": CLIENT,
    }
    for path, text in files.items():
        write_atomically(folder / path, text.encode(), durable=False)
    experiment.write(folder / PACKAGE / EXPERIMENT)
    return clients


def server_app(experiment: Path) -> ServerApp:
    """A ServerApp that runs the experiment of a file into the folder `out` of the app's configuration."""
    need_flower()
    from flwr.app import Context
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(load_experiment(experiment), Path(str(context.run_config["out"])), grid)

    return app


def serve(experiment: Experiment, out: Path, grid: Grid) -> None:
    """Run or resume an experiment whose clients Flower reaches through `grid`."""
    from wardround.federation.flower import FlowerTransport

    def connect(setup: Setup, folder: Path, checkpoint: Checkpoint | None) -> Transport:
        begin_journals(folder, setup.federation.names, checkpoint)
        codec = codec_named(setup.experiment.transport.codec)
        transport = FlowerTransport(codec, grid, setup.federation.names, setup.experiment.digest())
        transport.call_roll(ROLL_SECONDS)
        return transport

    run(experiment, out, resume=True, connect=connect)
