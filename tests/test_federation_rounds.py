"""The round loop: who is asked what and when, and what happens when some do not answer well."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from federation_fakes import FLOAT32, Behaviour, MeanMethod, Scripted, evaluation, fail
from wardround.errors import RunError
from wardround.federation.checkpoints import Checkpoints
from wardround.federation.local import InProcess, WorkerProcesses
from wardround.federation.messages import BadMessage, Message
from wardround.federation.observers import Observer
from wardround.federation.rounds import EVALUATE, RoundLoop, RoundOptions
from wardround.federation.server import Reply, Server


@dataclass
class Client:
    """Answers with its value, and notes what it was told to do."""

    value: float = 1.0
    examples: int = 1
    validation: Sequence[float | None] = (0.5,)
    told: list[Mapping[str, Any]] = field(default_factory=list)
    got: list[float] = field(default_factory=list)

    def __call__(self, message: Message) -> Message:
        """The reply."""
        told = message.scalars
        self.told.append(told)
        self.got.append(message.tensors["state/w"][0].item())
        scalars: dict[str, Any] = {"examples": self.examples}
        if told.get("evaluate_personal"):
            scalars["personal"] = evaluation(self.validation[(told["round"] - 1) % len(self.validation)])
        if told["phase"] == EVALUATE:
            return Message({}, scalars)
        return Message({"state/w": torch.full((2,), self.value)}, scalars)


class Log(Observer):
    """Writes down every event."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.refused: dict[str, str] = {}

    def round_started(self, round: int, clients: Sequence[str]) -> None:
        """See `Observer`."""
        self.events.append(("started", round, "".join(clients)))

    def answered(self, round: int, phase: str, client: str, answer: Any) -> None:
        """See `Observer`."""
        self.events.append(("answered", phase, client))
        if not isinstance(answer, Message):
            self.refused[client] = answer.reason

    def combining(self, round: int, phase: str) -> None:
        """See `Observer`."""
        self.events.append(("combining", phase))

    def traffic(self, round: int, phase: str, entries: dict[tuple[str, str], int]) -> None:
        """See `Observer`."""
        self.events.append(("traffic", phase, sorted(entries)))

    def round_ended(self, round: int, server: Server) -> None:
        """See `Observer`."""
        self.events.append(("ended", round, server.round))

    def checkpointing(self, round: int) -> None:
        """See `Observer`."""
        self.events.append(("checkpointing", round))

    def checkpointed(self, round: int) -> None:
        """See `Observer`."""
        self.events.append(("checkpointed", round))


def loop(
    clients: Mapping[str, Behaviour],
    rounds: int = 1,
    method: MeanMethod | None = None,
    folder: Path | None = None,
    seed: int = 0,
    **options: Any,
) -> RoundLoop:
    """A round loop over scripted clients in this process, starting with weights of 0."""
    return RoundLoop(
        method=method or MeanMethod(),
        server=Server({"w": torch.zeros(2)}),
        transport=InProcess(FLOAT32, Scripted(clients)),
        clients=tuple(clients),
        rounds=rounds,
        options=RoundOptions(**options),
        seed=seed,
        checkpoints=Checkpoints(folder, "experiment") if folder else None,
        observers=[Log()],
    )


def log(run: RoundLoop) -> Log:
    """The loop's log."""
    (observer,) = run.observers
    assert isinstance(observer, Log)
    return observer


def weight(run: RoundLoop) -> float:
    """The server's weight, which is the same twice."""
    first, second = run.server.state["w"].tolist()
    assert first == second
    return float(first)


# ---- the course of a round


def test_a_round_from_its_start_to_its_checkpoint(tmp_path: Path) -> None:
    run = loop({"a": Client(2.0, examples=3), "b": Client(6.0)}, folder=tmp_path)
    run.run()
    assert weight(run) == (3 * 2 + 6) / 4
    both = [("a", "down"), ("a", "up"), ("b", "down"), ("b", "up")]
    assert log(run).events == [
        ("started", 1, "ab"),
        ("answered", "train", "a"),
        ("answered", "train", "b"),
        ("traffic", "train", both),
        ("combining", "train"),
        ("ended", 1, 1),
        ("checkpointing", 1),
        ("checkpointed", 1),
        ("answered", EVALUATE, "a"),
        ("answered", EVALUATE, "b"),
        ("traffic", EVALUATE, both),
    ]


def test_phases_come_in_order_and_only_the_last_evaluates_and_saves(tmp_path: Path) -> None:
    client, method = Client(), MeanMethod(("importance", "train"))
    run = loop({"a": client}, rounds=2, method=method, folder=tmp_path)
    run.run()
    assert [phase for phase, _ in method.seen] == ["importance", "train"] * 2
    assert [(told["round"], told["phase"]) for told in client.told] == [
        (1, "importance"), (1, "train"), (2, "importance"), (2, "train"), (2, EVALUATE),
    ]  # fmt: skip
    for told in (client.told[0], client.told[2]):
        assert not any(told[key] for key in ("evaluate_received", "evaluate_personal", "checkpoint", "final"))
    assert client.got == [0.0, 1.0, 1.0, 1.0, 1.0]


def flags(client: Client) -> list[tuple[int, ...]]:
    """(round, evaluate_received, evaluate_personal, checkpoint, final) of each training message."""
    keys = ("round", "evaluate_received", "evaluate_personal", "checkpoint", "final")
    return [tuple(int(told[key]) for key in keys) for told in client.told if told["phase"] != EVALUATE]


def test_each_round_is_evaluated_by_default_the_server_s_model_one_round_later(tmp_path: Path) -> None:
    client = Client()
    loop({"a": client}, rounds=3, folder=tmp_path).run()
    assert flags(client) == [(1, 0, 1, 1, 0), (2, 1, 1, 1, 0), (3, 1, 1, 1, 1)]
    last = client.told[-1]
    assert last == {"round": 3, "phase": EVALUATE, "evaluate_received": True, "final": True}


def test_evaluation_and_checkpoints_every_so_many_rounds_and_at_the_end(tmp_path: Path) -> None:
    client = Client()
    loop({"a": client}, rounds=5, folder=tmp_path, evaluate_every=2, checkpoint_every=3).run()
    assert flags(client) == [(1, 0, 0, 0, 0), (2, 0, 1, 0, 0), (3, 1, 0, 1, 0), (4, 0, 1, 0, 0), (5, 1, 1, 1, 1)]
    assert Checkpoints(tmp_path, "experiment").rounds() == [3, 5]


def test_whoever_may_miss_the_next_checkpoint_saves_for_it_at_once(tmp_path: Path) -> None:
    clients = {name: Client() for name in "ab"}
    loop(clients, rounds=5, folder=tmp_path, participation=0.5, checkpoint_every=2).run()
    told = [t for client in clients.values() for t in client.told if t["phase"] != EVALUATE]
    saved = {t["round"]: (t["checkpoint"], t["checkpoint_round"]) for t in told}
    assert saved == {1: (True, 2), 2: (True, 2), 3: (True, 4), 4: (True, 4), 5: (True, 5)}


def test_without_checkpoints_none_are_asked_for() -> None:
    client = Client()
    loop({"a": client}, rounds=2).run()
    assert [told[3] for told in flags(client)] == [0, 0]


def test_the_server_s_model_need_not_be_evaluated() -> None:
    client = Client()
    loop({"a": client}, rounds=2, evaluate_server=False).run()
    assert [told[1] for told in flags(client)] == [0, 0]
    assert client.told[-1]["phase"] == "train"


def test_a_run_that_is_complete_is_only_evaluated() -> None:
    client = Client()
    run = loop({"a": client}, rounds=3)
    run.server.round = 3
    run.run()
    assert [told["phase"] for told in client.told] == [EVALUATE]


# ---- who takes part


def test_participants_are_drawn_from_the_seed_and_the_round_alone() -> None:
    names = {f"client {i:02d}": Client() for i in range(20)}
    run = loop(names, participation=0.25)
    drawn = [run.participants(round) for round in range(1, 30)]
    assert drawn[6] == loop(names, participation=0.25).participants(7)
    assert all(len(set(clients)) == 5 for clients in drawn)
    assert all(clients == sorted(clients) for clients in drawn)
    assert len({tuple(clients) for clients in drawn}) > 25
    assert {client for clients in drawn for client in clients} == set(names)
    assert drawn[0] != loop(names, participation=0.25, seed=1).participants(1)


@pytest.mark.parametrize(
    ("clients", "participation", "size"), [(4, 1.0, 4), (4, 0.6, 2), (4, 0.625, 3), (10, 0.01, 1), (1, 0.1, 1)]
)
def test_the_share_is_rounded_and_never_nobody(clients: int, participation: float, size: int) -> None:
    names = {str(i): Client() for i in range(clients)}
    assert len(loop(names, participation=participation).participants(1)) == size


def test_only_participants_are_asked_but_all_are_evaluated_at_the_end() -> None:
    clients = {name: Client() for name in "abcd"}
    run = loop(clients, participation=0.5)
    chosen = run.participants(1)
    run.run()
    asked = {name: [told["phase"] for told in client.told] for name, client in clients.items()}
    assert asked == {name: ["train", EVALUATE] if name in chosen else [EVALUATE] for name in "abcd"}


def test_impossible_options_are_refused() -> None:
    for wrong in (
        {"participation": 0.0},
        {"participation": 1.1},
        {"quorum": 0},
        {"deadline": 0},
        {"evaluate_every": 0},
    ):
        with pytest.raises(ValidationError):
            RoundOptions.model_validate(wrong)


# ---- clients in trouble


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (Client(float("nan")), "'state/w' holds 2 values that are not finite"),
        (Client(float("inf")), "'state/w' holds 2 values that are not finite"),
        (fail, "LookupError: no images for today"),
        (lambda message: Message({"state/w": torch.ones(3)}, {"examples": 1}), "has shape (3,)"),
        (lambda message: Message({"state/w": torch.ones(2)}), "'examples'"),
        (lambda message: Message({"state/w": torch.ones(2)}, {"examples": 1, "personal": "fine"}), "'personal'"),
        (lambda message: Message({}, {"examples": 1}), "'state/w' is missing"),
        (lambda message: b"rubbish", "not a Wardround message"),
    ],
)
def test_a_bad_update_is_refused_and_the_rest_averaged(bad: Behaviour, says: str) -> None:
    run = loop({"a": Client(2.0), "bad": bad, "c": Client(4.0)}, evaluate_server=False)
    run.run()
    assert weight(run) == 3.0
    assert list(log(run).refused) == ["bad"]
    assert says in log(run).refused["bad"]


def test_a_lost_quorum_ends_the_run_with_the_reasons_and_changes_nothing(tmp_path: Path) -> None:
    clients: dict[str, Behaviour] = {"a": Client(2.0), "b": fail, "c": Client(float("nan"))}
    run = loop(clients, rounds=3, folder=tmp_path)
    with pytest.raises(RunError) as error:
        run.run()
    assert str(error.value).startswith("round 1: 1 of 3 clients gave a usable answer, the quorum is 2. ")
    assert "b: LookupError: no images for today" in str(error.value)
    assert "c: tensor 'state/w' holds 2 values" in str(error.value)
    assert (weight(run), run.server.round) == (0.0, 0)
    assert run.checkpoints is not None
    assert run.checkpoints.rounds() == []
    assert ("traffic", "train", [("a", "down"), ("a", "up"), ("b", "down"), ("c", "down"), ("c", "up")]) in log(
        run
    ).events


def test_a_lost_quorum_in_a_later_round_leaves_the_earlier_ones(tmp_path: Path) -> None:
    def once(message: Message) -> Message:
        return Client(5.0)(message) if message.scalars["round"] == 1 else fail(message)

    run = loop({"a": once}, rounds=3, folder=tmp_path)
    with pytest.raises(RunError, match="round 2: 0 of 1"):
        run.run()
    latest = Checkpoints(tmp_path, "experiment").latest()
    assert latest is not None
    assert latest.server().state["w"].tolist() == [5.0, 5.0]


@pytest.mark.parametrize(
    ("clients", "quorum", "needed"),
    [(100, 0.55, 55), (4, 0.5, 2), (5, 0.5, 3), (3, 0.01, 1), (3, 1.0, 3), (10, 0.1, 1)],
)
def test_the_quorum_is_a_share_rounded_up(clients: int, quorum: float, needed: int) -> None:
    def behaviours(usable: int) -> dict[str, Behaviour]:
        return {f"{i:03d}": Client() if i < usable else fail for i in range(clients)}

    loop(behaviours(needed), quorum=quorum, evaluate_server=False).run()
    with pytest.raises(RunError, match=f"the quorum is {needed}"):
        loop(behaviours(needed - 1), quorum=quorum, evaluate_server=False).run()


class Hasty(MeanMethod):
    """A method that looks at one reply."""

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        """The first reply's weight."""
        server.state = next(replies).message.under("state")


def test_quorum_and_traffic_do_not_depend_on_the_method_s_patience() -> None:
    with pytest.raises(RunError, match="1 of 3"):
        loop({"a": Client(), "b": fail, "c": fail}, method=Hasty()).run()


def test_clients_without_images_leave_the_server_as_it_was() -> None:
    run = loop({"a": Client(3.0, examples=0), "b": Client(4.0, examples=0)}, rounds=2)
    run.run()
    assert (weight(run), run.server.round) == (0.0, 2)


def test_a_client_without_images_counts_for_the_quorum_but_not_in_the_mean() -> None:
    run = loop({"a": Client(3.0), "b": Client(99.0, examples=0)}, quorum=1.0)
    run.run()
    assert weight(run) == 3.0


def test_a_client_that_cannot_be_evaluated_at_the_end_does_not_end_the_run() -> None:
    def unwell(message: Message) -> Message:
        return fail(message) if message.scalars["phase"] == EVALUATE else Client(1.0)(message)

    run = loop({"a": unwell, "b": Client(1.0)})
    run.run()
    assert list(log(run).refused) == ["a"]


# ---- messages


def test_one_message_for_all() -> None:
    method = MeanMethod()
    loop({"a": Client(), "bb": Client()}, method=method).run()
    assert method.asked == [("train", ""), (EVALUATE, "")]


def test_a_message_for_each() -> None:
    clients, method = {"a": Client(7.0), "bb": Client(9.0)}, MeanMethod(individual=True)
    loop(clients, method=method).run()
    assert method.asked == [(phase, name) for phase in ("train", EVALUATE) for name in clients]
    assert [client.got for client in clients.values()] == [[1.0, 9.0], [2.0, 10.0]]


class Eager(MeanMethod):
    """A method that changes the server at every reply, before all messages are sent."""

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        """Whatever came last."""
        for reply in replies:
            server.state["w"] = reply.message.tensors["state/w"]
            server.memory["seen"] = torch.ones(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_messages_are_of_the_state_at_the_start_of_the_exchange(workers: int) -> None:
    def report(message: Message) -> Message:
        return Message({"state/w": message.tensors["state/w"] * 10}, {"examples": 1})

    clients = dict.fromkeys(["a", "bb", "ccc", "dddd"], report)
    run = loop(clients, method=Eager(individual=True), evaluate_server=False)
    if workers:
        make = functools.partial(Scripted, clients)
        run.transport = WorkerProcesses(FLOAT32, make, dict.fromkeys(clients, 1), workers)
    with run.transport:
        run.run()
    assert weight(run) == 40.0


class Leaky(MeanMethod):
    """A method that sends what it must not."""

    def outgoing(self, server: Server, client: str, phase: str) -> Mapping[str, Tensor]:
        """Raises, as rules do."""
        raise BadMessage(f"state entry 'head.weight' is local and may not travel to {client}")


@pytest.mark.parametrize("individual", [False, True])
def test_a_leak_stops_the_run_before_anything_is_sent(individual: bool) -> None:
    client = Client()
    with pytest.raises(BadMessage, match="may not travel"):
        loop({"a": client}, method=Leaky(individual=individual)).run()
    assert client.told == []


# ---- the best round


def best(scores: Sequence[Sequence[float | None]], **options: Any) -> tuple[int, float] | None:
    """The best round of clients whose validation scores per round are given."""
    clients = {str(i): Client(validation=own) for i, own in enumerate(scores)}
    run = loop(clients, rounds=len(scores[0]), evaluate_server=False, **options)
    run.run()
    return run.best


def test_the_best_round_has_the_highest_mean_score_the_first_of_equals() -> None:
    assert best([[0.25, 0.5, 0.5, 0.0]]) == (2, 0.5)
    assert best([[0.0, 0.75, 0.5], [1.0, 0.5, 0.5]]) == (2, 0.625)


def test_undefined_scores_do_not_count() -> None:
    assert best([[None, None]]) is None
    assert best([[None, 0.5], [0.25, None]]) == (2, 0.5)


def test_the_best_round_is_one_that_is_saved() -> None:
    assert best([[0.5, 0.75, 1.0, 0.25, 0.0]], checkpoint_every=2) == (2, 0.75)


def test_the_best_round_survives_a_resume(tmp_path: Path) -> None:
    course = [0.1, 0.9, 0.2, 0.3, 0.4, 0.5]
    whole = loop({"a": Client(validation=course)}, rounds=6, folder=tmp_path / "whole", evaluate_server=False)
    whole.run()
    assert (whole.best, whole.checkpoints.rounds()) == ((2, 0.9), [2, 5, 6])  # type: ignore[union-attr]
    first = loop({"a": Client(validation=course)}, rounds=4, folder=tmp_path / "cut", evaluate_server=False)
    first.run()
    checkpoint = Checkpoints(tmp_path / "cut", "experiment").latest()
    assert checkpoint is not None
    second = loop({"a": Client(validation=course)}, rounds=6, folder=tmp_path / "cut", evaluate_server=False)
    second.server, second.best = checkpoint.server(), (checkpoint.notes["best"], checkpoint.notes["best_score"])
    second.run()
    assert second.best == whole.best
    contents = [
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.*")}
        for name in ("whole", "cut")
    ]
    assert contents[0] == contents[1]


def test_a_refused_client_s_score_does_not_count() -> None:
    run = loop({"a": Client(validation=[0.5]), "b": Client(float("nan"), validation=[1.0])}, evaluate_server=False)
    run.run()
    assert run.best == (1, 0.5)


# ---- memory


def test_replies_are_folded_one_at_a_time() -> None:
    """When the method sees one reply, the next client has not been asked yet."""
    seen: list[list[str]] = []
    begun: list[str] = []

    def client(name: str, message: Message) -> Message:
        begun.append(name)
        return Client()(message)

    class Watching(MeanMethod):
        def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
            seen.extend([reply.client, *begun] for reply in replies)

    names: dict[str, Callable[[Message], Message]] = {name: functools.partial(client, name) for name in "abc"}
    loop(names, method=Watching(), evaluate_server=False).run()
    assert seen == [["a", "a"], ["b", "a", "b"], ["c", "a", "b", "c"]]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 5)), min_size=1, max_size=6))
def test_the_whole_way_is_a_weighted_mean(parts: list[tuple[float, int]]) -> None:
    run = loop({str(i): Client(value, n) for i, (value, n) in enumerate(parts)}, evaluate_server=False)
    run.run()
    total = sum(n for _, n in parts)
    assert weight(run) == pytest.approx(sum(v * n for v, n in parts) / total if total else 0.0, rel=1e-6, abs=1e-6)
