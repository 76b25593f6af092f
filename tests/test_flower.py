"""The same messages over Flower: a grid of our own making for what can go wrong, and its simulation for the bits."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment_fixtures import checkpoint_bytes, figures, tiny
from federation_fakes import FLOAT32, X, x
from wardround.config import load_experiment
from wardround.errors import InputError, RunError
from wardround.experiment import run
from wardround.federation import flower_setup
from wardround.federation.flower_setup import need_flower

pytest.importorskip("flwr", reason="the extra [flower] is not installed")
need_flower()

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from wardround import flower_app, flower_client  # noqa: E402
from wardround.federation.flower import ANSWER, RECORD, ROLL_CALL, Envelope, FlowerTransport  # noqa: E402
from wardround.federation.messages import Message as Ours  # noqa: E402
from wardround.federation.transport import Refused  # noqa: E402

TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1  # as Flower sets them in its processes

Answer = Callable[[Envelope], Envelope | Error | None]  # None: never answers


def add_one(envelope: Envelope) -> Envelope:
    """A sound client."""
    message = FLOAT32.decode(envelope.frame)
    tensors = {name: tensor + 1 for name, tensor in message.tensors.items()}
    return replace(envelope, frame=FLOAT32.encode(Ours(tensors, {"examples": 1})))


@dataclass
class FakeGrid:
    """What a server sees of Flower: nodes that answer at once, or not at all.

    Attributes:
        clients: by node, its name and how it answers.
    """

    clients: dict[int, tuple[str, Answer]]
    sent: list[Envelope] = field(default_factory=list)
    replies: dict[str, Message] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def get_node_ids(self) -> list[int]:
        """All that are connected."""
        return list(self.clients)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Let the nodes answer."""
        names = []
        for message in messages:
            names.append(f"message-{next(self.numbers)}")
            message.metadata.__dict__["_message_id"] = names[-1]
            name, answer = self.clients[message.metadata.dst_node_id]
            envelope = Envelope.opened(message.content)
            self.sent.append(envelope)
            asked_name = message.metadata.message_type == ROLL_CALL
            found = replace(envelope, client=name) if asked_name else answer(envelope)
            if isinstance(found, Error):
                self.replies[names[-1]] = Message(error=found, reply_to=message)
            elif found is not None:
                self.replies[names[-1]] = Message(content=found.sealed(), reply_to=message)
            if names[-1] in self.replies:
                self.replies[names[-1]].metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        """What has been answered."""
        return [self.replies.pop(name) for name in names if name in self.replies]


def transport_over(*answers: Answer) -> FlowerTransport:
    """A transport to clients a, b, ... that has called the roll."""
    names = [chr(ord("a") + number) for number in range(len(answers))]
    grid = FakeGrid({100 + n: (name, answer) for n, (name, answer) in enumerate(zip(names, answers, strict=True))})
    found = FlowerTransport(FLOAT32, grid, names, "digest")  # type: ignore[arg-type]
    found.call_roll(1)
    return found


def exchange(transport: FlowerTransport, deadline: float | None = None) -> dict[str, Ours | Refused]:
    return dict(transport.exchange(dict.fromkeys(transport.clients, x(2.0)), X, deadline))


def reason(answer: Ours | Refused) -> str:
    assert isinstance(answer, Refused), answer
    return answer.reason


# ---- the envelope


def test_an_envelope_comes_back_as_it_went() -> None:
    envelope = Envelope("Ärzte & Co", "digest", "ticket", b"\x00\xff", "no")
    assert Envelope.opened(envelope.sealed()) == envelope


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({RECORD: ConfigRecord({"client": "a"})}),
        RecordDict({RECORD: ConfigRecord({**Envelope().__dict__, "frame": "text"})}),
        RecordDict({RECORD: ConfigRecord({**Envelope().__dict__, "more": 1})}),
    ],
)
def test_anything_else_is_no_envelope(content: RecordDict) -> None:
    assert Envelope.opened(content) == Envelope(refusal="not a message of this package")


# ---- the server's side


def test_answers_come_in_the_order_of_the_clients_and_bytes_are_counted() -> None:
    transport = transport_over(add_one, add_one, add_one)
    answers = exchange(transport)
    assert list(answers) == ["a", "b", "c"]
    for answer in answers.values():
        assert isinstance(answer, Ours)
        torch.testing.assert_close(answer.tensors["x"], torch.full((2,), 3.0))
    frame = len(FLOAT32.encode(x(2.0)))
    entries = transport.ledger.take()
    assert entries["a", "down"] == frame
    assert set(entries) == {(client, way) for client in "abc" for way in ("up", "down")}


def test_a_reply_to_another_message_is_refused() -> None:
    kept: list[Envelope] = []

    def replayed(envelope: Envelope) -> Envelope:
        kept.append(add_one(envelope))
        return kept[0]

    transport = transport_over(add_one, replayed)
    assert isinstance(exchange(transport)["b"], Ours)
    second = exchange(transport)
    assert "replayed" in reason(second["b"])
    assert isinstance(second["a"], Ours), "the others are not touched by it"


def test_a_reply_in_anothers_name_is_refused() -> None:
    transport = transport_over(add_one, lambda envelope: replace(add_one(envelope), client="a"))
    assert "a reply of 'a'" in reason(exchange(transport)["b"])


def test_rubbish_is_refused_and_the_others_go_on() -> None:
    transport = transport_over(
        lambda envelope: replace(envelope, frame=add_one(envelope).frame[:-3]),
        lambda envelope: replace(envelope, frame=b"", refusal="no images\nfor today"),
        add_one,
    )
    answers = exchange(transport)
    assert reason(answers["a"])
    assert reason(answers["b"]) == "no images?for today"
    assert isinstance(answers["c"], Ours)


def test_a_lost_message_is_sent_again_and_the_answer_is_the_same() -> None:
    failures = iter([Error(code=5, reason="node gone"), Error(code=8, reason="app crashed")])
    transport = transport_over(lambda envelope: next(failures, None) or add_one(envelope))
    assert isinstance(exchange(transport)["a"], Ours)
    frames = [envelope.frame for envelope in transport.grid.sent if envelope.frame]  # type: ignore[attr-defined]
    assert len(frames) == 3
    assert len(set(frames)) == 1


def test_a_client_that_stays_away_is_given_up() -> None:
    transport = transport_over(lambda envelope: Error(code=5, reason="node\ngone"), add_one)
    answers = exchange(transport)
    assert reason(answers["a"]) == "Flower: node?gone (code 5)"
    assert isinstance(answers["b"], Ours)


def test_a_deadline_refuses_who_has_not_answered() -> None:
    transport = transport_over(lambda envelope: None, add_one)
    answers = exchange(transport, deadline=0.2)
    assert reason(answers["a"]) == "late: no answer before the deadline"
    assert isinstance(answers["b"], Ours)


def test_a_node_that_left_is_not_connected_and_found_when_it_is_back() -> None:
    transport = transport_over(add_one, add_one)
    grid: Any = transport.grid
    grid.clients[200] = grid.clients.pop(101)
    grid.clients[101] = ("b", lambda envelope: Error(code=5, reason="gone"))
    del transport.nodes["b"]
    assert reason(exchange(transport)["b"]) == "not connected"
    del grid.clients[101]
    transport.call_roll(1)
    assert transport.nodes == {"a": 100, "b": 200}


def test_the_roll_is_complete_and_unambiguous() -> None:
    grid = FakeGrid({1: ("a", add_one)})
    with pytest.raises(RunError, match=r"no answer from b within 0\.1 s"):
        FlowerTransport(FLOAT32, grid, ["a", "b"], "digest").call_roll(0.1)  # type: ignore[arg-type]
    for other, said in (("a", "two nodes call themselves 'a'"), ("stranger", "a node calls itself 'stranger'")):
        grid = FakeGrid({1: ("a", add_one), 2: (other, add_one)})
        with pytest.raises(RunError, match=said):
            FlowerTransport(FLOAT32, grid, ["a", "b"], "digest").call_roll(1)  # type: ignore[arg-type]


def test_a_node_may_take_long_to_say_who_it_is() -> None:
    """Longer than one look for names lasts; the question is not asked twice."""

    class SlowGrid(FakeGrid):
        looks = 0

        def pull_messages(self, names: Iterable[str]) -> list[Message]:
            self.looks += 1
            return super().pull_messages(names) if self.looks > 5 else []

    grid = SlowGrid({1: ("a", add_one)})
    transport = FlowerTransport(FLOAT32, grid, ["a"], "digest")  # type: ignore[arg-type]
    for _ in range(4):
        transport._ask_names(0.1)
    assert transport.nodes == {"a": 1}
    assert len(grid.sent) == 1


# ---- the client's side


def test_a_client_refuses_what_is_not_for_it(tmp_path: Path) -> None:
    experiment = tiny()
    experiment.write(tmp_path / "config.toml")
    residence = flower_client.Residence(tmp_path)
    app = flower_client.client_app(residence)
    digest = flower_client.resident(residence)[1]

    def asked(envelope: Envelope, kind: str = ANSWER, **config: Any) -> Envelope:
        node = Context(run_id=1, node_id=7, node_config=config, state=RecordDict(), run_config={})
        message = Message(content=envelope.sealed(), dst_node_id=7, message_type=kind)
        message.metadata.__dict__["_message_id"] = "m"
        return Envelope.opened(app(message, node).content)

    first = {"partition-id": 0}
    assert asked(Envelope(experiment=digest, ticket="t"), ROLL_CALL, **first) == Envelope("site-01", digest, "t")
    assert asked(Envelope(experiment=digest), ROLL_CALL, client="site-02").client == "site-02"
    assert "has no such client" in asked(Envelope(experiment=digest), ROLL_CALL, client="elsewhere").refusal
    other = asked(Envelope("site-01", "another", "t", b"frame"), **first)
    assert "the server's experiment is another one" in other.refusal
    assert "the message is for 'site-03'" in asked(Envelope("site-03", digest), **first).refusal
    assert asked(Envelope("site-01", digest, "t", b"rubbish"), **first).refusal


# ---- Flower's simulation


def test_the_simulation_has_the_bits_of_the_local_transport_and_resumes_to_them(tmp_path: Path) -> None:
    """Two processes that share three clients, a method with local state and targets; then the last rounds again."""
    pytest.importorskip("ray", reason="Flower's simulation needs Ray")
    keys = {"method__name": "pafp-alt", "method__groups": 1, "rounds": 3}
    run(tiny(**keys), tmp_path / "local", workers=1)
    run(tiny(**keys, transport__name="flower"), tmp_path / "flower", workers=2)
    assert figures(tmp_path / "flower") == figures(tmp_path / "local")
    assert checkpoint_bytes(tmp_path / "flower") == checkpoint_bytes(tmp_path / "local")
    assert not (tmp_path / "flower" / "state").exists()
    traffic = [(tmp_path / name / "messages.jsonl").read_text() for name in ("local", "flower")]
    assert traffic[0] == traffic[1]

    longer = keys | {"rounds": 4}
    run(tiny(**longer), tmp_path / "local", workers=1, resume=True)
    run(tiny(**longer, transport__name="flower"), tmp_path / "flower", workers=2, resume=True)
    assert figures(tmp_path / "flower") == figures(tmp_path / "local")
    assert checkpoint_bytes(tmp_path / "flower") == checkpoint_bytes(tmp_path / "local")


def test_an_app_holds_the_experiment_and_what_flower_asks_for(tmp_path: Path) -> None:
    experiment = tiny(rounds=1)
    assert flower_app.build_app(experiment, tmp_path / "app", "My Trial!", tmp_path / "run") == 3
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-trial"
    found = project["tool"]["flwr"]["app"]
    assert found["config"] == {"out": str(tmp_path / "run")}
    for component in found["components"].values():
        module, attribute = component.split(":")
        source = tmp_path / "app" / f"{module.replace('.', '/')}.py"
        names: dict[str, Any] = {"__file__": str(source)}
        exec(source.read_text(), names)
        assert type(names[attribute]).__name__ in ("ServerApp", "ClientApp")
    assert load_experiment(tmp_path / "app" / "app" / "experiment.toml").digest() == experiment.digest()
    assert "--num-supernodes 3" in (tmp_path / "app" / "README.md").read_text()
    with pytest.raises(InputError, match="is not empty"):
        flower_app.build_app(experiment, tmp_path / "app", "again", tmp_path / "run")


def test_the_servers_app_runs_the_experiment_over_any_grid(tmp_path: Path) -> None:
    """With a grid that calls our ClientApp in this process: the bits of the local transport once more."""
    run(tiny(rounds=2), tmp_path / "local", workers=1)
    app = flower_client.client_app()
    config = {"out": str(tmp_path / "flower")}

    class Nodes(FakeGrid):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            names = []
            for message in messages:
                node = message.metadata.dst_node_id
                names.append(f"message-{next(self.numbers)}")
                message.metadata.__dict__["_message_id"] = names[-1]
                where = Context(
                    run_id=1, node_id=node, node_config={"partition-id": node}, state=RecordDict(), run_config=config
                )
                self.replies[names[-1]] = app(message, where)
                self.replies[names[-1]].metadata.__dict__["_src_node_id"] = node
            return names

    flower_app.serve(tiny(rounds=2), tmp_path / "flower", Nodes(dict.fromkeys(range(3))))  # type: ignore[arg-type]
    assert figures(tmp_path / "flower") == figures(tmp_path / "local")
    assert checkpoint_bytes(tmp_path / "flower") == checkpoint_bytes(tmp_path / "local")


# ---- Flower itself


def test_without_flower_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise flower_setup.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(flower_setup.importlib.metadata, "version", missing)
    with pytest.raises(InputError, match=r'needs Flower: pip install "wardround\[flower\]"'):
        need_flower()


@pytest.mark.parametrize(
    ("version", "warned"), [("1.41.9", True), ("1.42.0", False), ("1.42.3", False), ("1.43.0", True), ("2.0", True)]
)
def test_an_untested_version_is_named(monkeypatch: pytest.MonkeyPatch, version: str, warned: bool) -> None:
    monkeypatch.setattr(flower_setup.importlib.metadata, "version", lambda name: version)
    assert (need_flower() is not None) is warned


def test_telemetry_is_off() -> None:
    import os

    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
