"""Transports: the same answers whoever computes them, and a client in trouble is alone in it."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from federation_fakes import (
    FLOAT32,
    Behaviour,
    Scripted,
    X,
    adders,
    die,
    fail,
    full_disk,
    interrupt_myself,
    plus,
    wait_for,
    x,
)
from wardround.errors import RunError
from wardround.federation import local
from wardround.federation.codecs import CODECS, Codec
from wardround.federation.local import InProcess, WorkerProcesses, _spread
from wardround.federation.messages import Message
from wardround.federation.transport import Ledger, Outbox, Refused, Transport

Answers = list[tuple[str, Message | Refused]]


def processes(behaviours: Mapping[str, Behaviour], workers: int) -> WorkerProcesses:
    """Worker processes for scripted clients, the first client at the first worker and so on."""
    make = functools.partial(Scripted, behaviours)
    return WorkerProcesses(FLOAT32, make, dict.fromkeys(behaviours, 1), workers)


def ask(carrier: Transport, clients: Any, value: float = 0.0, deadline: float | None = None) -> Answers:
    """A broadcast of one message, and all answers."""
    return list(carrier.exchange(dict.fromkeys(clients, x(value)), X, deadline))


def values(answers: Answers) -> list[tuple[str, float | str]]:
    """The first number of each answer, or the reason of its refusal."""
    return [(name, a.reason if isinstance(a, Refused) else a.tensors["x"][0].item()) for name, a in answers]


# ---- what all transports do


class Replay(Transport):
    """Carries nothing, and answers with given frames."""

    def __init__(self, answers: Mapping[str, bytes | Refused], codec: Codec = FLOAT32) -> None:
        super().__init__(codec)
        self.answers = answers

    def carry(self, outbox: Outbox, deadline: float | None) -> Iterator[tuple[str, bytes | Refused]]:
        """The given frames."""
        for client in outbox.clients:
            outbox.frame(client)
            yield client, self.answers[client]


def test_rubbish_is_refused_and_what_is_sound_goes_through() -> None:
    bomb = FLOAT32.encode(Message({"x": torch.zeros(2**23)}, {"examples": 1}))  # 32 MiB for two numbers
    answers = {
        "sound": FLOAT32.encode(Message({"x": torch.ones(2)}, {"examples": 3})),
        "nan": FLOAT32.encode(Message({"x": torch.tensor([1, float("nan")])}, {"examples": 3})),
        "shape": FLOAT32.encode(Message({"x": torch.ones(3)}, {"examples": 3})),
        "extra": FLOAT32.encode(Message({"x": torch.ones(2), "head": torch.ones(2)}, {"examples": 3})),
        "silent": FLOAT32.encode(Message({"x": torch.ones(2)})),
        "noise": b"\x80\x04noise",
        "large": bomb,
        "late": Refused("late"),
    }
    got = dict(ask(Replay(answers), answers))
    assert isinstance(got["sound"], Message)
    assert got["sound"].scalars["examples"] == 3
    reasons = {name: answer.reason for name, answer in got.items() if isinstance(answer, Refused)}
    assert reasons.keys() == answers.keys() - {"sound"}
    for name, part in {
        "nan": "'x' holds 1 values that are not finite",
        "shape": "has shape (3,)",
        "extra": "unexpected tensor 'head'",
        "silent": "'examples'",
        "noise": "not a Wardround message",
        "large": f"{len(bomb)} bytes",
    }.items():
        assert part in reasons[name]


@dataclass
class Hander:
    """A client half that hands messages over, or answers frames."""

    reply: Callable[[Message], Message]
    handed: list[str] = field(default_factory=list)

    def answer(self, client: str, frame: bytes) -> bytes:
        """The reply to a frame, as a frame."""
        return HALF.encode(self.reply(HALF.decode(frame)))

    def hand(self, client: str, message: Message) -> Message:
        """The reply to a message."""
        self.handed.append(client)
        return self.reply(message)


HALF = CODECS["float16"]


def test_within_a_process_messages_are_handed_over_and_counted_as_frames() -> None:
    hander = Hander(lambda message: Message({"x": message.tensors["x"] + 1}, {"examples": 3}))
    direct = InProcess(FLOAT32, hander)
    got = dict(ask(direct, "ab"))
    assert hander.handed == ["a", "b"]
    assert all(isinstance(answer, Message) and answer.tensors["x"].tolist() == [1, 1] for answer in got.values())
    sent, back = len(FLOAT32.encode(x(0.0))), len(FLOAT32.encode(Message(x(1.0).tensors, {"examples": 3})))
    assert direct.ledger.take() == {
        (client, way): size for client in "ab" for way, size in (("down", sent), ("up", back))
    }


def test_what_is_handed_over_is_checked_too() -> None:
    for reply, reason in (
        (Message({"x": torch.tensor([1, float("nan")])}, {"examples": 3}), "not finite"),
        (Message({"x": torch.ones(2), "head": torch.ones(2)}, {"examples": 3}), "unexpected tensor 'head'"),
        (Message({"x": torch.ones(2)}, {"examples": -1}), "'examples'"),
        (Message({"x": torch.ones(2, dtype=torch.float64)}, {"examples": 3}), "only float32"),
    ):
        (answer,) = dict(ask(InProcess(FLOAT32, Hander(lambda message, reply=reply: reply)), "a")).values()  # type: ignore[misc]
        assert isinstance(answer, Refused)
        assert reason in answer.reason


def test_a_lossy_codec_makes_frames_within_a_process_too() -> None:
    hander = Hander(lambda message: Message({"x": torch.tensor([1.0, 0.1])}, {"examples": 3}))
    assert not InProcess(HALF, hander).hands_over
    assert not InProcess(FLOAT32, hander, hand_over=False).hands_over
    (answer,) = dict(ask(InProcess(HALF, hander), "a")).values()
    assert isinstance(answer, Message)
    assert answer.tensors["x"].tolist() == [1.0, float(np.float16(0.1))]


def test_bytes_are_counted_both_ways_once_they_travel() -> None:
    answer = FLOAT32.encode(Message({"x": torch.ones(2)}, {"examples": 3}))
    carrier = Replay({"b": answer, "a": Refused("late"), "c": b"rubbish"})
    ask(carrier, "bac")
    sent = len(FLOAT32.encode(x(0.0)))
    expected = {("a", "down"): sent, ("b", "down"): sent, ("b", "up"): len(answer), ("c", "down"): sent, ("c", "up"): 7}
    taken = carrier.ledger.take()
    assert list(taken.items()) == list(expected.items())
    assert carrier.ledger.take() == {}


class Counting(Codec):
    """A codec that counts what it encodes."""

    count = 0

    def encode(self, message: Message) -> bytes:
        """As always."""
        type(self).count += 1
        return super().encode(message)


def test_a_broadcast_is_encoded_once() -> None:
    carrier = InProcess(Counting("float32", 0), Scripted(adders(20)))
    before = Counting.count
    assert len(ask(carrier, adders(20))) == 20
    assert Counting.count - before == 1


class Lazy(Mapping[str, Message]):
    """Messages made on demand."""

    def __init__(self, clients: str) -> None:
        self.clients, self.made = clients, []

    def __getitem__(self, client: str) -> Message:
        self.made.append(client)
        return x(float(ord(client)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)


def test_individual_messages_are_made_when_they_are_sent() -> None:
    messages = Lazy("abcd")
    exchange = InProcess(FLOAT32, Scripted(adders(4))).exchange(messages, X)
    assert values([next(exchange)]) == [("a", ord("a") + 1)]
    assert messages.made == ["a"]
    assert values(list(exchange)) == [("b", ord("b") + 2), ("c", ord("c") + 3), ("d", ord("d") + 4)]
    assert messages.made == ["a", "b", "c", "d"]


def test_an_outbox_holds_one_frame() -> None:
    ledger = Ledger()
    outbox = Outbox(Lazy("ab"), FLOAT32, ledger)
    first, second = outbox.frame("a"), outbox.frame("b")
    assert first != second
    assert outbox._last is not None
    assert outbox._last[1] is second
    assert ledger.take() == {("a", "down"): len(first), ("b", "down"): len(second)}


# ---- workers


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_gives_the_answers_of_none(workers: int) -> None:
    behaviours = adders(7)
    alone = ask(InProcess(FLOAT32, Scripted(behaviours)), behaviours, 0.5)
    with processes(behaviours, workers) as carrier:
        for _ in range(2):
            assert values(ask(carrier, behaviours, 0.5)) == values(alone)
        assert values(ask(carrier, "fb", 0.5)) == [("f", 6.5), ("b", 2.5)]


def test_a_fresh_interpreter_gives_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "process_context", lambda: multiprocessing.get_context("spawn"))
    behaviours: dict[str, Behaviour] = {**adders(2), "c": fail}
    with processes(behaviours, 1) as carrier:
        answers = values(ask(carrier, behaviours))
    assert answers[:2] == [("a", 1.0), ("b", 2.0)]
    assert "LookupError" in str(answers[2][1])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_inside_one_client_is_its_own(workers: int) -> None:
    behaviours: dict[str, Behaviour] = {**adders(3), "b": fail}
    with processes(behaviours, workers) if workers else InProcess(FLOAT32, Scripted(behaviours)) as carrier:
        for _ in range(2):
            answers = values(ask(carrier, "abc"))
            assert [answers[0], answers[2]] == [("a", 1.0), ("c", 3.0)]
            assert str(answers[1][1]).startswith("LookupError: no images for today (fail, line ")


def test_a_disk_in_trouble_is_no_client_s_own_error() -> None:
    behaviours: dict[str, Behaviour] = {**adders(2), "b": full_disk}
    with pytest.raises(OSError, match="No space left"):
        ask(InProcess(FLOAT32, Scripted(behaviours)), "ab")
    with (
        processes(behaviours, 2) as carrier,
        pytest.raises(RunError, match=r"could not go on: OSError: .*No space left.*--resume"),
    ):
        ask(carrier, "ab")


def test_a_worker_that_cannot_begin_says_why() -> None:
    def make() -> Scripted:
        raise MemoryError("no room for the images")

    with (
        WorkerProcesses(FLOAT32, make, {"a": 1}, 1) as carrier,
        pytest.raises(RunError, match=r"could not begin: MemoryError: no room for the images"),
    ):
        ask(carrier, "a")


class Distinct:
    """Answers with the number of different frame objects that it has been given."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def answer(self, client: str, frame: bytes) -> bytes:
        """See above."""
        if not any(frame is other for other in self.frames):
            self.frames.append(frame)
        return FLOAT32.encode(Message({"x": torch.full((2,), float(len(self.frames)))}, {"examples": 1}))


def test_a_worker_gets_a_broadcast_once() -> None:
    with WorkerProcesses(FLOAT32, Distinct, dict.fromkeys("abcdef", 1), 2) as carrier:
        assert [value for _, value in values(ask(carrier, "abcdef"))] == [1.0] * 6
        assert [value for _, value in values(ask(carrier, "abcdef"))] == [2.0] * 6


def test_large_frames_both_ways_do_not_lock_up() -> None:
    with processes(adders(6), 2) as carrier:
        big = Message({"x": torch.zeros(2**19)})
        schema = {"x": transport_spec(2**19)}
        answers = list(carrier.exchange(dict.fromkeys("abcdef", big), schema))
    assert [value for _, value in values(answers)] == [1, 2, 3, 4, 5, 6]


def transport_spec(size: int) -> Any:
    """A vector."""
    from wardround.federation.messages import Spec

    return Spec((size,))


def test_a_late_client_is_refused_and_its_answer_never_taken_for_the_next(tmp_path: Path) -> None:
    go = tmp_path / "go"
    behaviours: dict[str, Behaviour] = {
        **adders(2),
        "c": functools.partial(wait_for, go),
        "d": functools.partial(plus, 4),
    }
    with processes(behaviours, 2) as carrier:  # c shares a worker with a, d with b
        first = values(ask(carrier, "abcd", 0.0, deadline=2.0))
        assert first == [("a", 1.0), ("b", 2.0), ("c", "late: no answer before the deadline"), ("d", 4.0)]
        sent = carrier.ledger.take()
        assert ("c", "up") not in sent
        go.touch()
        assert values(ask(carrier, "abcd", 10.0)) == [("a", 11.0), ("b", 12.0), ("c", 10.0), ("d", 14.0)]


def test_those_behind_a_late_client_are_late_too_and_nothing_was_sent_to_them(tmp_path: Path) -> None:
    go = tmp_path / "go"
    behaviours: dict[str, Behaviour] = {
        "a": functools.partial(wait_for, go),
        **{k: v for k, v in adders(3).items() if k != "a"},
    }
    with processes(behaviours, 1) as carrier:
        assert [str(reason)[:5] for _, reason in values(ask(carrier, "abc", 0.0, deadline=0.3))] == ["late:"] * 3
        assert list(carrier.ledger.take()) == [("a", "down")]
        go.touch()
        assert values(ask(carrier, "cba", 1.0)) == [("c", 4.0), ("b", 3.0), ("a", 1.0)]


def test_in_this_process_each_client_has_the_deadline_for_itself() -> None:
    def slow(message: Message) -> Message:
        time.sleep(0.6)
        return plus(0, message)

    carrier = InProcess(FLOAT32, Scripted({"a": slow, "b": functools.partial(plus, 2)}))
    answers = values(ask(carrier, "ab", deadline=0.5))
    assert answers == [("a", "late: no answer within 0.5 s"), ("b", 2.0)]


def test_an_exchange_may_be_abandoned() -> None:
    with processes(adders(6), 2) as carrier:
        abandoned = carrier.exchange(dict.fromkeys("abcdef", x(0.0)), X)
        next(abandoned)
        abandoned.close()
        assert values(ask(carrier, "abcdef", 1.0)) == [(name, value + 2.0) for value, name in enumerate("abcdef")]


def ahead(log: Path, others: int, client: str, message: Message) -> Message:
    """Note who has begun; the first client waits until so many others have, and a little longer."""
    with log.open("a") as file:
        file.write(client)
    if client == "a":
        while len(log.read_text()) < 1 + others:
            time.sleep(0.001)
        time.sleep(0.3)
        return Message({"x": torch.full((2,), float(len(log.read_text())))}, {"examples": 1})
    return plus(0.0, message)


@pytest.mark.parametrize(("room", "others"), [(1, 1), (10**6, 11)])
def test_workers_do_not_run_ahead_without_bound(
    room: int, others: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "WAITING_ROOM", room)
    clients = "abcdefghijkl"
    behaviours = {client: functools.partial(ahead, tmp_path / "log", others, client) for client in clients}
    load = dict.fromkeys(clients, 1) | {"a": 100}  # one worker has `a`, the other all the rest
    with WorkerProcesses(FLOAT32, functools.partial(Scripted, behaviours), load, 2) as carrier:
        answers = values(ask(carrier, clients))
    assert [name for name, _ in answers] == list(clients)
    assert answers[0][1] == 1 + others  # had begun when `a` was done


def test_a_killed_worker_ends_the_run_and_names_the_client() -> None:
    with processes({"a": functools.partial(plus, 1), "b": die}, 2) as carrier:
        exchange = carrier.exchange(dict.fromkeys("ab", x(0.0)), X)
        assert next(exchange)[0] == "a"
        with pytest.raises(RunError, match=r"exit code -9\) while it worked for client 'b'.*--resume"):
            next(exchange)


def test_a_worker_killed_between_exchanges_is_noticed_too() -> None:
    with processes(adders(2), 2) as carrier:
        ask(carrier, "ab")
        carrier._workers[1].process.kill()
        carrier._workers[1].process.join()
        with pytest.raises(RunError, match=r"exit code -9\) while it worked for client 'b'"):
            ask(carrier, "ab")


def test_a_worker_killed_in_the_middle_of_an_answer_is_noticed_too(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with processes({"a": functools.partial(wait_for, go), "b": functools.partial(plus, 1)}, 2) as carrier:
        big = Message({"x": torch.zeros(2**19)})
        exchange = carrier.exchange(dict.fromkeys("ba", big), {"x": transport_spec(2**19)})
        next(exchange)  # a's worker is at work
        go.touch()
        assert carrier._workers[0].pipe.poll(20)  # and now blocked: its answer does not fit into the pipe
        carrier._workers[0].process.kill()
        with pytest.raises(RunError, match="client 'a'"):
            next(exchange)


def test_interrupts_are_for_the_parent() -> None:
    with processes({"a": interrupt_myself, "b": functools.partial(plus, 1)}, 2) as carrier:
        assert values(ask(carrier, "ab")) == [("a", 0.0), ("b", 1.0)]


def test_closing_ends_every_worker_busy_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "CLOSING_SECONDS", 0.1)
    carrier = processes({"a": functools.partial(wait_for, tmp_path / "never"), "b": functools.partial(plus, 1)}, 2)
    exchange = carrier.exchange(dict.fromkeys("ba", x(0.0)), X)
    next(exchange)
    carrier.close()
    assert [worker.process.exitcode for worker in carrier._workers] == [-signal.SIGKILL, 0]


ORPHANS = """
    import functools, os, sys, time
    from wardround.federation.codecs import CODECS
    from wardround.federation.local import WorkerProcesses
    from wardround.federation.messages import Message

    class Sleeper:
        def answer(self, client, frame):
            os.write(1, b"x")
            time.sleep(60)
            os.write(1, b"still here")

    carrier = WorkerProcesses(CODECS["float32"], Sleeper, {"a": 1, "b": 1, "c": 1}, 3)
    list(carrier.exchange({"a": Message(), "b": Message()}, {}))
"""


def test_workers_end_with_their_parent() -> None:
    """Two are at work for a minute and one is idle; all hold the pipe, which is at its end when the last one is."""
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(ORPHANS)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert os.read(parent.stdout.fileno(), 1) + os.read(parent.stdout.fileno(), 1) == b"xx"
        parent.kill()
        assert parent.stdout.read() == b""


def test_clients_are_spread_by_load() -> None:
    assert _spread({"a": 10, "b": 2, "c": 3, "d": 1}, 2) == {"a": 0, "b": 1, "c": 1, "d": 1}
    assert _spread({"a": 0, "b": 0, "c": 0}, 2) == {"a": 0, "b": 1, "c": 0}
