"""A run that was cut short, in any way, goes on to the same bytes as one that was not."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiment_fixtures import (
    CLIENTS,
    KilledWhen,
    checkpoint_bytes,
    command_line,
    figures,
    in_a_process,
    lines,
    tiny,
    tiny_file,
)
from wardround import experiment as engine
from wardround import run_folder
from wardround.config import Experiment, load_experiment
from wardround.errors import InputError, RunError
from wardround.experiment import run
from wardround.federation import checkpoints, files, store
from wardround.methods.base import Method

PAFP_ALT = {"method__name": "pafp-alt", "method__diagnostics": False}
METHODS = {"fedavg": {"model__head": "shared"}, "pafp": {"method__name": "pafp"}, "pafp-alt": PAFP_ALT}
ROUND = 3  # the round in which things go wrong


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an uninterrupted run of a method, made when first asked for."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("whole") / "run"
            run(tiny(**METHODS[name]), made[name])
        return made[name]

    return folder


def assert_same(run_folder: Path, expected: Path) -> None:
    """Equal checkpoints to the byte, equal figures, and the same lines once each."""
    assert checkpoint_bytes(run_folder) == checkpoint_bytes(expected)
    assert figures(run_folder) == figures(expected)
    for log in ("metrics.jsonl", "messages.jsonl"):
        assert lines(run_folder, log) == lines(expected, log)


# ---- workers


@pytest.mark.parametrize("method", METHODS)
def test_two_workers_give_the_bits_of_one(method: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    run(tiny(**METHODS[method]), tmp_path / "two", workers=2)
    assert_same(tmp_path / "two", whole(method))


def test_the_recorded_configuration_repeats_the_run(whole: Callable[[str], Path], tmp_path: Path) -> None:
    run(load_experiment(whole("pafp-alt") / "config.toml"), tmp_path / "again")
    assert_same(tmp_path / "again", whole("pafp-alt"))


def test_every_round_and_client_has_its_lines_once(whole: Callable[[str], Path]) -> None:
    found = lines(whole("pafp-alt"))
    for kind, rounds in (("examples", (1, 2, 3, 4)), ("personal", (2, 4)), ("received", (2, 4))):
        assert [(line["round"], line["client"]) for line in found if line.get(kind)] == [
            (round, client) for round in rounds for client in CLIENTS
        ]
    assert [line["round"] for line in found if "server" in line] == [1, 2, 3, 4]


# ---- SIGKILL


def _die_at_step(number: int, victim: Callable[[], int]) -> None:
    """Kill a process in the middle of a training step, counted over all clients of one worker."""
    original, steps = Method.backward, [0]

    def backward(self: Method, step: Any) -> Any:
        steps[0] += 1
        if steps[0] == number:
            os.kill(victim(), signal.SIGKILL)
            time.sleep(60)  # a worker outlives its parent by a moment
        return original(self, step)

    Method.backward = backward  # type: ignore[method-assign]


def _die_before_writing(name: str, round: int) -> None:
    """Kill this process between the files of a checkpoint."""
    original = files.write_atomically

    def write(path: Path, data: bytes, durable: bool = True) -> None:
        if path.name == name and f"round-{round:04d}" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
        original(path, data, durable)

    checkpoints.write_atomically = write  # type: ignore[attr-defined]


def _training(experiment: Experiment, folder: Path) -> None:
    _die_at_step(2 * 3 * (ROUND - 1) + 3, os.getpid)  # two batches a client and round: the second client's first
    run(experiment, folder)


def _training_in_a_worker(experiment: Experiment, folder: Path) -> None:
    _die_at_step(2 * 2 * (ROUND - 1) + 3, os.getppid)  # the worker with two clients kills the process above it
    run(experiment, folder, workers=2)


def _combining(experiment: Experiment, folder: Path) -> None:
    run(experiment, folder, observers=[KilledWhen("combining", ROUND)])


def _checkpointing(experiment: Experiment, folder: Path) -> None:
    run(experiment, folder, observers=[KilledWhen("checkpointing", ROUND)])


def _before_the_manifest(experiment: Experiment, folder: Path) -> None:
    _die_before_writing("manifest.json", ROUND)
    run(experiment, folder)


def _evaluating_at_the_end(experiment: Experiment, folder: Path) -> None:
    class AtTheEnd(KilledWhen):
        def answered(self, round: int, phase: str, client: str, answer: object) -> None:
            if phase == "evaluate" and client == CLIENTS[1]:
                os.kill(os.getpid(), signal.SIGKILL)

    run(experiment, folder, observers=[AtTheEnd("combining", 0)])


MOMENTS = [
    _training,
    _training_in_a_worker,
    _combining,
    _checkpointing,
    _before_the_manifest,
    _evaluating_at_the_end,
]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__.strip("_"))
def test_a_killed_run_resumes_to_the_same_bytes(
    moment: Callable[[Experiment, Path], None], whole: Callable[[str], Path], tmp_path: Path
) -> None:
    experiment, folder = tiny(**METHODS["pafp-alt"]), tmp_path / "run"
    status = in_a_process(lambda: moment(experiment, folder))
    assert status == -signal.SIGKILL
    assert not (folder / "results.json").exists()
    run(experiment, folder, resume=True)
    assert_same(folder, whole("pafp-alt"))


def test_state_on_disk_of_a_run_without_a_checkpoint_is_not_taken_up(tmp_path: Path) -> None:
    sparse = tiny(**PAFP_ALT, rounds=3, transport__state_ram_mib=0, federation__checkpoint_every=3)
    assert in_a_process(lambda: _combining(sparse, tmp_path / "killed")) == -signal.SIGKILL
    run(sparse, tmp_path / "killed", resume=True)
    run(sparse, tmp_path / "whole")
    assert_same(tmp_path / "killed", tmp_path / "whole")


def test_clients_that_sit_out_the_checkpoint_round_keep_their_state(tmp_path: Path) -> None:
    """A client trains in a round without a checkpoint, and is not drawn for the round that has one."""
    once = {"federation__participation": 0.34, "federation__checkpoint_every": 2}
    experiment = tiny(**METHODS["pafp"], seed=1, rounds=6, **once)
    run(experiment, tmp_path / "whole")
    drawn = [line["client"] for line in lines(tmp_path / "whole") if line.get("log")]
    assert drawn[2] == drawn[4] != drawn[3], "this seed no longer draws such clients"

    killed = KilledWhen("round_started", 5)
    assert in_a_process(lambda: run(experiment, tmp_path / "cut", observers=[killed])) == -signal.SIGKILL
    run(experiment, tmp_path / "cut", resume=True)
    assert_same(tmp_path / "cut", tmp_path / "whole")


# ---- Ctrl-C


def _interrupt_at_step(number: int) -> None:
    original, steps = Method.backward, [0]

    def backward(self: Method, step: Any) -> Any:
        steps[0] += 1
        if steps[0] == number:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, step)

    Method.backward = backward  # type: ignore[method-assign]


def test_ctrl_c_exits_130_and_resume_goes_on(whole: Callable[[str], Path], tmp_path: Path) -> None:
    file, folder = tiny_file(tmp_path, **METHODS["pafp-alt"]), tmp_path / "run"

    def work() -> None:
        _interrupt_at_step(2 * 3 * (ROUND - 1) + 3)
        command_line("run", file, "--out", folder)

    assert in_a_process(work) == 130
    command = in_a_process(lambda: command_line("run", file, "--out", folder, "--resume"))
    assert command == 0
    assert_same(folder, whole("pafp-alt"))


def test_ctrl_c_with_workers_exits_130(whole: Callable[[str], Path], tmp_path: Path) -> None:
    experiment, folder = tiny(**METHODS["pafp-alt"]), tmp_path / "run"

    class Interrupted(KilledWhen):
        def round_started(self, round: int, clients: object) -> None:
            if round == ROUND:
                signal.raise_signal(signal.SIGINT)

    def work() -> None:
        with pytest.raises(KeyboardInterrupt):
            run(experiment, folder, workers=2, observers=[Interrupted("combining", 0)])

    assert in_a_process(work) == 0
    run(experiment, folder, workers=2, resume=True)
    assert_same(folder, whole("pafp-alt"))


def test_ctrl_c_in_the_middle_of_a_checkpoint_finishes_it(tmp_path: Path) -> None:
    file, folder = tiny_file(tmp_path), tmp_path / "run"
    original = files.write_atomically

    def write(path: Path, data: bytes, durable: bool = True) -> None:
        if path.name == "server.safetensors" and f"round-{ROUND:04d}" in str(path):
            os.kill(os.getpid(), signal.SIGINT)
        original(path, data, durable)

    def work() -> None:
        checkpoints.write_atomically = write  # type: ignore[attr-defined]
        command_line("run", file, "--out", folder)

    assert in_a_process(work) == 130
    assert checkpoints.Checkpoints(folder / "checkpoints", None).load(ROUND).round == ROUND


# ---- one folder, one experiment, one process


def test_a_folder_that_holds_a_run_is_refused_without_resume(whole: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match="holds a run already; give another --out, or --resume"):
        run(tiny(**METHODS["fedavg"]), whole("fedavg"))


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("irreplaceable")
    for resume in (False, True):
        with pytest.raises(InputError, match="is not empty and holds no run"):
            run(tiny(), tmp_path, resume=resume)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be the run's folder"):
        run(tiny(), tmp_path / "file" / "run")


def test_another_experiment_in_the_folder_is_named_key_by_key(whole: Callable[[str], Path]) -> None:
    other = tiny(**METHODS["fedavg"], training__lr=0.5, data__phantoms__clients=2)
    with pytest.raises(InputError) as caught:
        run(other, whole("fedavg"), resume=True)
    assert "belongs to another experiment: data.phantoms.clients: 3 -> 2; training.lr: 0.01 -> 0.5" in str(caught.value)


def test_a_checkpoint_from_another_experiment_is_refused(whole: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole("fedavg"), folder)
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(whole("pafp") / "checkpoints", folder / "checkpoints")
    with pytest.raises(InputError, match="belongs to another experiment"):
        run(tiny(**METHODS["fedavg"]), folder, resume=True)


def test_other_images_under_the_same_configuration_are_refused(whole: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole("fedavg"), folder)
    roster = json.loads((folder / "federation.json").read_text())
    roster["clients"][1]["counts"]["train"][0] += 1
    (folder / "federation.json").write_text(json.dumps(roster))
    with pytest.raises(InputError, match=r"began with other images .* clients whose numbers differ: site-02"):
        run(tiny(**METHODS["fedavg"], rounds=5), folder, resume=True)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    def work() -> None:
        with pytest.raises(InputError, match="another process is running in it"):
            run(tiny(), tmp_path / "run")

    (tmp_path / "run").mkdir()
    with run_folder.alone(tmp_path / "run"):
        assert in_a_process(work) == 0
    assert not (tmp_path / "run").exists(), "nothing was written there"


# ---- finished, and further


def test_resuming_a_finished_run_reads_no_image_and_changes_nothing(
    whole: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = whole("pafp-alt")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def fail(*_: object) -> None:
        raise AssertionError("a finished run has nothing to set up")

    monkeypatch.setattr(engine, "set_up", fail)
    results = run(tiny(**METHODS["pafp-alt"]), folder, resume=True)
    assert results == json.loads((folder / "results.json").read_text())
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_finished_run_can_be_given_more_rounds(whole: Callable[[str], Path], tmp_path: Path) -> None:
    short, folder = tiny(**METHODS["pafp-alt"], rounds=2), tmp_path / "run"
    run(short, folder)
    assert json.loads((folder / "results.json").read_text())["rounds"] == 2
    run(tiny(**METHODS["pafp-alt"]), folder, resume=True, workers=2)
    for round in (3, 4):  # what is kept of round 2, when it was the last, holds personal models besides
        assert checkpoint_bytes(folder, round) == checkpoint_bytes(whole("pafp-alt"), round)
    assert lines(folder) == lines(whole("pafp-alt"))
    extended, expected = figures(folder), figures(whole("pafp-alt"))
    # Round 2 was the last one then: its three messages said `true` where they now say `false`.
    assert extended.pop("communication")["bytes_down"] == expected.pop("communication")["bytes_down"] - 3
    assert extended == expected


def test_fewer_rounds_than_are_done_are_refused(whole: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match="has done 4 rounds already, but rounds = 2 asks for fewer"):
        run(tiny(**METHODS["fedavg"], rounds=2), whole("fedavg"), resume=True)


def test_resume_starts_where_there_is_nothing_yet(whole: Callable[[str], Path], tmp_path: Path) -> None:
    run(tiny(**METHODS["fedavg"]), tmp_path / "new", resume=True)
    assert_same(tmp_path / "new", whole("fedavg"))


# ---- damage


def test_a_damaged_checkpoint_falls_back_and_says_so(whole: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole("pafp-alt"), folder)
    file = folder / "checkpoints" / "round-0004" / "server.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    results = run(tiny(**METHODS["pafp-alt"]), folder, resume=True)
    complaint = [warning for warning in results["warnings"] if "round-0004: the checkpoint is damaged" in warning]
    assert len(complaint) == 1
    expected = figures(whole("pafp-alt"))
    assert figures(folder) == {**expected, "warnings": [*expected["warnings"], *complaint]}
    assert checkpoint_bytes(folder) == checkpoint_bytes(whole("pafp-alt"))
    assert lines(folder) == lines(whole("pafp-alt"))


def test_a_log_cut_short_in_its_last_line_is_mended(whole: Callable[[str], Path], tmp_path: Path) -> None:
    experiment, folder = tiny(**METHODS["fedavg"]), tmp_path / "run"
    assert in_a_process(lambda: _combining(experiment, folder)) == -signal.SIGKILL
    for log in ("metrics.jsonl", "messages.jsonl"):
        with (folder / log).open("a") as file:
            file.write('{"round":3,"client":"si')
    run(experiment, folder, resume=True)
    assert_same(folder, whole("fedavg"))


# ---- a full disk


def _limit(size: int) -> None:
    """No file may grow beyond `size` bytes: writes fail as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_full_disk_while_the_server_saves_keeps_the_earlier_checkpoint(
    whole: Callable[[str], Path], tmp_path: Path
) -> None:
    experiment, folder = tiny(**METHODS["fedavg"]), tmp_path / "run"
    server = whole("fedavg") / "checkpoints" / "round-0004" / "server.safetensors"

    class Filling(KilledWhen):
        def checkpointing(self, round: int) -> None:
            if round == ROUND:
                _limit(server.stat().st_size // 2)

    def work() -> None:
        with pytest.raises(RunError, match=r"round 3 could not be written .* the last complete one is of round 2"):
            run(experiment, folder, observers=[Filling("combining", 0)])

    assert in_a_process(work) == 0
    assert checkpoints.Checkpoints(folder / "checkpoints", None).rounds() == [1, 2]
    run(experiment, folder, resume=True)
    assert_same(folder, whole("fedavg"))


def test_a_full_disk_exits_1_with_a_message(tmp_path: Path) -> None:
    file, folder, words = tiny_file(tmp_path), tmp_path / "run", tmp_path / "words"

    def work() -> None:
        _limit(100_000)
        command_line("run", file, "--out", folder)

    assert in_a_process(work, words) == 1
    said = words.read_text()
    assert "the checkpoint of round 1 could not be written (File too large); there is no earlier one" in said
    assert "--resume" in said
    assert "Traceback" not in said


def test_a_full_disk_under_the_logs_exits_1_with_a_message(tmp_path: Path) -> None:
    file, folder, words = tiny_file(tmp_path), tmp_path / "run", tmp_path / "words"

    def work() -> None:
        _limit(4_000)
        command_line("run", file, "--out", folder)

    assert in_a_process(work, words) == 1
    said = words.read_text()
    assert "File too large. What is finished is kept" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_while_one_client_saves_stops_the_run(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its update must not be in a checkpoint, nor missing from a round, because its state could not be saved."""

    def write(path: Path, data: bytes, durable: bool = True) -> None:
        if path.name == "client-site-02.safetensors" and f"round-{ROUND:04d}" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        files.write_atomically(path, data, durable)

    monkeypatch.setattr(store, "write_atomically", write)
    with pytest.raises(RunError, match="No space left on device"):
        run(tiny(**METHODS["pafp-alt"]), tmp_path / "run", workers=workers)
    assert checkpoints.Checkpoints(tmp_path / "run" / "checkpoints", None).rounds() == [1, 2]
