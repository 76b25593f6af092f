"""What a message costs on the way: seconds a round beyond training itself, over loopback, with two clients.

    python benchmarks/overhead.py [--rounds 8] [--out DIR] [naive] [resident]

`resident` is `wardround deploy` with TLS: one process a client, which keeps the model. `naive` is the same experiment
as a Flower app under Flower's own SuperLink and SuperNodes, without TLS: a process for every message. Both clients
train at once, so on two cores the longer of the two trainings is what a round would take without any overhead.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
import tables
from wardround.config import experiment_from
from wardround.federation.flower_setup import QUIET
from wardround.recording import METRICS, read_lines

CLIENTS = ("site-01", "site-02")
EXPERIMENT: dict[str, Any] = {
    "seed": 0,
    "data": {
        "source": "phantoms",
        "image_size": 64,
        "phantoms": {"clients": 2, "train_per_client": 320, "val_per_client": 60, "test_per_client": 60},
    },
    "model": {"backbone": "timm:tf_efficientnet_lite0", "pretrained": True, "finetune_blocks": 2},
    "training": {"batch_size": 32, "memory_format": "channels_last", "depthwise": "shifts", "device": "cpu"},
    "method": {"name": "pafp-alt", "lambda": 10.0, "m_loc": 1.0, "reduce": "channel"},
}
LIMIT_SECONDS = 600.0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="WAY", help="naive, resident; by default both")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=tables.DEFAULT_FOLDER)
    args = parser.parse_args()
    run(args.out, args.rounds, args.ways or list(WAYS))


def run(out: Path, rounds: int, ways: list[str]) -> None:
    """Measure and print."""
    os.environ |= QUIET | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    found = {}
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            found[way] = costs(WAYS[way](Path(folder), rounds))
            rows = [(name, *map(_seconds, _quartiles(one))) for name, one in found.items()]
    tables.show("seconds a round beyond training, two clients on loopback", ("", "lower", "median", "upper"), rows)
    tables.write(out, "overhead", {"machine": processes.machine(), "rounds": rounds, "overhead_seconds": found})


def costs(run_folder: Path) -> list[float]:
    """Seconds of each round but the first beyond the longest that a client worked."""
    worked: dict[int, float] = {}
    found = []
    for line in read_lines(run_folder / METRICS):
        evaluations = [line[key]["seconds"] for key in ("personal", "received") if line.get(key)]
        if "client" in line:
            own = worked.setdefault(line["round"], 0.0)
            worked[line["round"]] = max(own, (line.get("seconds") or 0.0) + sum(evaluations))
        elif line["round"] > 1:
            found.append(line["seconds"] - worked[line["round"]])
    return found


def resident(folder: Path, rounds: int) -> Path:
    """`wardround deploy`, with TLS and keys."""
    experiment = written(folder, rounds)
    _call("deploy", "init", experiment, "--port", str(free_port()), "--out", folder / "d")
    with contextlib.ExitStack() as stack:
        for name in CLIENTS:
            stack.enter_context(running(_wardround("deploy", "client", folder / "d" / f"client-{name}"), folder, name))
        _call("deploy", "server", folder / "d" / "server")
    return folder / "d" / "server" / "run"


def naive(folder: Path, rounds: int) -> Path:
    """Flower's own processes, as its documentation starts them."""
    experiment, run_folder = written(folder, rounds), folder / "run"
    _call("flower", "build", experiment, "--out", folder / "app", "--run", run_folder)
    port = free_port()
    os.environ["FLWR_HOME"] = str(folder / "flower")
    (folder / "flower").mkdir()
    connection = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (folder / "flower" / "config.toml").write_text(connection)
    alone = "--disable-runtime-dependency-installation"
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            running(["flower-superlink", "--insecure", alone, "--port", str(port)], folder, "superlink")
        )
        wait_for_port(port)
        for number, name in enumerate(CLIENTS):
            config = f'partition-id={number} client="{name}"'
            own = ["--port", str(free_port()), "--node-config", config]
            node = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", *own]
            stack.enter_context(running(node, folder, name))
        subprocess.run(["flwr", "run", str(folder / "app"), "here"], check=True, stdout=subprocess.DEVNULL)
        wait_for(run_folder / "results.json")
    return run_folder


WAYS = {"naive": naive, "resident": resident}


def written(folder: Path, rounds: int) -> Path:
    """The experiment as a file."""
    file = folder / "overhead.toml"
    experiment_from(EXPERIMENT | {"rounds": rounds}, "overhead").write(file)
    return file


def _wardround(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from wardround.cli import main; main()", *map(str, arguments)]


def _call(*arguments: object) -> None:
    subprocess.run(_wardround(*arguments), check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_SECONDS)


@contextlib.contextmanager
def running(command: list[str], folder: Path, name: str) -> Iterator[None]:
    """A process that ends with the block, with all that it has started; what it says goes to `name.log`."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            yield
        finally:
            for member in reversed(processes.family(process.pid)) if process.poll() is None else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, 15)
            process.wait(timeout=30)


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for_port(port: int) -> None:
    """Until somebody listens."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise SystemExit(f"nobody listens on port {port}")


def wait_for(file: Path) -> None:
    """Until a file is there."""
    end = time.monotonic() + LIMIT_SECONDS
    while not file.exists():
        if time.monotonic() > end:
            raise SystemExit(f"{file} did not appear within {LIMIT_SECONDS:.0f} s")
        time.sleep(0.5)


def _quartiles(seconds: list[float]) -> list[float]:
    return statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3


def _seconds(value: float) -> str:
    return f"{value:.2f}"


if __name__ == "__main__":
    main()
