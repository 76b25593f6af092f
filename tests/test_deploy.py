"""A federation over TLS on this machine: the bits of the local transport, whatever dies on the way."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy_fixtures import deploy, founded, said, spoken_of, wait_until
from experiment_fixtures import CLIENTS, checkpoint_bytes, figures
from wardround.experiment import run
from wardround.federation.flower_setup import need_flower

pytest.importorskip("flwr", reason="the extra [flower] is not installed")
need_flower()

from wardround.deploy.agreement import read_agreement  # noqa: E402
from wardround.deploy.hospital import run_of  # noqa: E402
from wardround.deploy.serving import serve  # noqa: E402
from wardround.deploy.status import read_status  # noqa: E402
from wardround.federation.flower import Envelope, FlowerTransport  # noqa: E402
from wardround.using import load_trained  # noqa: E402

ALTERNATING = {"method__name": "pafp-alt", "method__groups": 1, "method__reduce": "channel"}


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that a test starts; none outlives it."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every frame that the server in this process sends or gets."""
    frames: list[bytes] = []
    push, look = FlowerTransport._push, FlowerTransport._opened

    def pushed(self: FlowerTransport, envelope: Envelope, nodes: Any, kind: str) -> list[str]:
        frames.append(envelope.frame)
        return push(self, envelope, nodes, kind)

    def looked(self: FlowerTransport, reply: Any, client: str, ticket: str) -> Any:
        frames.append(Envelope.opened(reply.content).frame)
        return look(self, reply, client, ticket)

    monkeypatch.setattr(FlowerTransport, "_push", pushed)
    monkeypatch.setattr(FlowerTransport, "_opened", looked)
    return frames


def clients_of(folders: list[Path], logs: Path) -> list[subprocess.Popen[bytes]]:
    return [deploy("client", folder, log=logs / f"{folder.name}.log") for folder in folders]


def server_files(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in checkpoint_bytes(folder).items() if name.endswith("server.safetensors")}


def local_tensors(folder: Path) -> Iterator[bytes]:
    """The bytes of every tensor that a client has kept to itself, of a size that cannot occur by chance."""
    import safetensors.torch

    for file in run_of(folder, read_agreement(folder)).glob("state/*/*.safetensors"):
        for tensor in safetensors.torch.load_file(file).values():
            if tensor.numel() >= 8 and len(tensor.unique()) > 4:
                yield tensor.numpy().tobytes()


@pytest.mark.parametrize("method", [ALTERNATING, {"method__name": "fedbn"}], ids=["pafp-alt", "fedbn"])
def test_the_bits_of_the_local_transport_and_nothing_local_on_the_wire(
    method: dict[str, Any], tmp_path: Path, processes: list[subprocess.Popen[bytes]], traffic: list[bytes]
) -> None:
    experiment = spoken_of(**method, rounds=3)
    run(experiment, tmp_path / "local", workers=1)
    server, *clients = founded(tmp_path / "deploy", experiment)
    processes += clients_of(clients, tmp_path)
    lines: list[str] = []
    results = serve(server, insecure=False, tell=lines.append)

    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert results["rounds"] == 3
    assert figures(server / "run") == figures(tmp_path / "local")
    assert server_files(server / "run") == server_files(tmp_path / "local")
    assert all("safetensors" not in name or "server" in name for name in checkpoint_bytes(server / "run"))
    final = checkpoint_bytes(tmp_path / "local", 3)
    for name, folder in zip(CLIENTS, clients, strict=True):
        own = checkpoint_bytes(run_of(folder, read_agreement(folder)), 3)
        file = f"checkpoints/round-0003/client-{name}.safetensors"
        assert own[file] == final[file], "the hospital has the model that the local run gave it"
        assert len(load_trained(run_of(folder, read_agreement(folder)), None).counts) == 3, "and can predict with it"
        assert (folder / "client.log").exists()
    kept = [data for folder in clients for data in local_tensors(folder)]
    assert kept
    assert len(traffic) > 20
    assert not any(data in frame for data in kept for frame in traffic)
    assert read_status(server)["state"] == "finished"


def test_what_is_killed_and_started_again_ends_with_the_same_bits(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    """A client is killed in the middle of a round, then the server in the middle of a later one."""
    experiment = spoken_of(**ALTERNATING, rounds=4).changed({"data.phantoms.train_per_client": 240}, "test")
    run(experiment, tmp_path / "local", workers=1)
    server, *clients = founded(tmp_path / "deploy", experiment)
    served = tmp_path / "server.log"
    processes.append(deploy("server", server, log=served))
    processes += clients_of(clients, tmp_path)
    *_, victim = processes
    log = tmp_path / f"{clients[-1].name}.log"
    wait_until(lambda: "answered" in said(log), what="the first answer")
    victim.send_signal(signal.SIGKILL)
    processes.append(deploy("client", clients[-1], log=log))
    wait_until(lambda: said(served).count("is back") == 1, what="the client's return")
    wait_until(lambda: (server / "run" / "checkpoints" / "round-0002").exists(), what="the second round's end")
    processes[0].send_signal(signal.SIGKILL)
    processes[0].wait()
    assert read_status(server)["state"] == "stopped"
    processes.append(deploy("server", server, log=served))

    assert processes[-1].wait(timeout=120) == 0, said(served)
    assert "cannot be reached since" in said(log)
    ours, theirs = figures(server / "run"), figures(tmp_path / "local")
    more = ours["communication"].pop("bytes_down") - theirs["communication"].pop("bytes_down")
    assert more >= 0, "what was lost was sent again"
    assert ours == theirs
    assert server_files(server / "run") == server_files(tmp_path / "local")
