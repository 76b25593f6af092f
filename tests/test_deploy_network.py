"""Who is let in, what is said when somebody is not, and what a client makes of a server that is away."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from deploy_fixtures import founded, free_port, spoken_of
from federation_fakes import FLOAT32, X, x
from wardround.errors import InputError
from wardround.federation.flower_setup import need_flower

pytest.importorskip("flwr", reason="the extra [flower] is not installed")
need_flower()

from flwr.app import Message  # noqa: E402
from flwr.common.constant import TIMESTAMP_HEADER  # noqa: E402
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER  # noqa: E402
from flwr.supercore.inflatable.inflatable_utils import push_objects  # noqa: E402

from wardround.deploy import authority as keys  # noqa: E402
from wardround.deploy import supernode  # noqa: E402
from wardround.deploy.attending import Attendant, Patience, Unreachable, _Trouble, attend  # noqa: E402
from wardround.deploy.doorkeeper import Doorkeeper  # noqa: E402
from wardround.deploy.hospital import open_hospital  # noqa: E402
from wardround.deploy.joining import Joining  # noqa: E402
from wardround.deploy.listening import bound, listening  # noqa: E402
from wardround.deploy.status import StatusBoard, read_status, status_text  # noqa: E402
from wardround.deploy.superlink import LinkGrid, LinkState, Run  # noqa: E402
from wardround.deploy.supernode import Link, connect, open_client  # noqa: E402
from wardround.deploy.transport import FAREWELL, HospitalTransport  # noqa: E402
from wardround.federation.flower import ANSWER, ROLL_CALL, Envelope  # noqa: E402
from wardround.federation.messages import Message as Ours  # noqa: E402
from wardround.federation.transport import Refused  # noqa: E402

# ---- the door

KEYS = {name: keys.new_key() for name in ("a", "b")}
KNOWN = {name: keys.public_pem(key) for name, key in KEYS.items()}


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An app that reads its request and says how long it is."""
    size, more = 0, True
    while more:
        event = await receive()
        size, more = size + len(event.get("body", b"")), event.get("more_body", False)
    status = 401 if scope["path"].endswith("doubt") else 200
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


def knock(path: str = "/v1/fleet/pull-messages", body: bytes = b"", **headers: str) -> tuple[int, list[str]]:
    """The status of a request of client a, and what the doorkeeper has said."""
    said: list[str] = []
    door = Doorkeeper(echo, 100, dict(KNOWN), said.append)
    shown = {FLEET_HTTP_PUBLIC_KEY_HEADER: base64.b64encode(KNOWN["a"]).decode()} | headers

    async def ask() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=door), base_url="http://server") as client:
            return (await client.post(path, content=body, headers=shown)).status_code

    return asyncio.run(ask()), said


def test_a_client_is_let_in_in_silence() -> None:
    assert knock(body=bytes(100)) == (200, [])


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/get-nodes", "/docs", "/v1/fleetx/y"])
def test_nothing_but_the_fleet_api_is_served(path: str) -> None:
    status, (line,) = knock(path)
    assert status == 404
    assert "which is not served here" in line


def test_a_strange_key_is_refused_before_anything_is_read() -> None:
    stranger = base64.b64encode(keys.public_pem(keys.new_key())).decode()
    status, (line,) = knock(body=bytes(10**6), **{FLEET_HTTP_PUBLIC_KEY_HEADER: stranger})
    assert status == 401
    assert "its key is none of the clients'" in line
    assert knock(**{FLEET_HTTP_PUBLIC_KEY_HEADER: "no base64!"})[1][0].endswith("it shows no key")


def test_a_message_that_is_too_large_is_refused_and_its_sender_named() -> None:
    status, (line,) = knock(body=bytes(101))
    assert "refused a (" in line
    assert "a message of more than 100 bytes" in line
    assert status != 200


@pytest.mark.parametrize(
    ("behind", "said"),
    [(0, "or its signature is not that of its key"), (400, "its clock is 400 s behind"), (-400, "s ahead of")],
)
def test_a_refused_signature_is_told_from_a_wrong_clock(behind: float, said: str) -> None:
    then = datetime.now(UTC) - timedelta(seconds=behind)
    status, (line,) = knock("/v1/fleet/doubt", **{TIMESTAMP_HEADER: then.isoformat()})
    assert status == 401
    assert said in line


def test_the_same_is_not_said_twice_in_a_minute() -> None:
    said: list[str] = []
    door = Doorkeeper(echo, 100, {}, said.append)
    for sentence in ("one", "one", "two"):
        door.say(sentence)
    assert said == ["one", "two"]


def test_a_port_in_use_is_named() -> None:
    address = ("127.0.0.1", free_port())
    with bound(address) as sock:
        sock.listen()
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1, port {address[1]}"), bound(address):
            pass


# ---- the whole way, within this process

Answer = Callable[[Envelope], Envelope | None]


class Bench:
    """A server that listens on this machine, in plain text, and clients of it."""

    def __init__(self, names: tuple[str, ...] = ("a", "b")) -> None:
        self.said: list[str] = []
        self.state = LinkState({name: KNOWN[name] for name in names})
        self.run = Run(self.state)
        self.address = ("127.0.0.1", free_port())
        self.transport = HospitalTransport(
            FLOAT32, LinkGrid(self.run), names, "digest", self.objection, self.said.append
        )
        self.ended = threading.Event()

    def objection(self, said: Joining) -> str | None:
        return "it means another experiment" if said.agreement != "digest" else None

    def link(self, name: str) -> Link:
        """Client `name` connects."""
        address = f"{self.address[0]}:{self.address[1]}"
        return connect(open_client(address, None, KEYS[name]), KEYS[name])

    def client(self, name: str, answer: Answer, digest: str = "digest") -> threading.Thread:
        """A client that lives in a thread, joins, and answers until the end."""
        word = Joining(wardround="1", agreement=digest, frozen="", min_count=0, splits={})

        def live() -> None:
            link = self.link(name)
            while not self.ended.is_set():
                message = link.pull()
                if message is None:
                    time.sleep(0.01)
                    continue
                asked = Envelope.opened(message.content)
                joins = message.metadata.message_type == ROLL_CALL
                joined = replace(asked, client=name, frame=word.model_dump_json().encode())
                found = joined if joins else answer(asked)
                if found is None:
                    return
                link.push(Message(content=found.sealed(), reply_to=message))

        def until_the_server_ends() -> None:
            with contextlib.suppress(httpx.TransportError, httpx.HTTPStatusError):
                live()

        thread = threading.Thread(target=until_the_server_ends, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    with listening(made.state, dict(KNOWN), made.address, None, 2**20, made.said.append):
        yield made
        made.ended.set()
    made.run.end()


def add_one(asked: Envelope) -> Envelope:
    """A sound client."""
    if not asked.frame:  # the farewell
        return asked
    message = FLOAT32.decode(asked.frame)
    tensors = {name: tensor + 1 for name, tensor in message.tensors.items()}
    return replace(asked, frame=FLOAT32.encode(Ours(tensors, {"examples": 1})))


def exchanged(bench: Bench, deadline: float | None = 20) -> dict[str, Ours | Refused]:
    return dict(bench.transport.exchange(dict.fromkeys(bench.transport.clients, x(2.0)), X, deadline))


def test_messages_go_there_and_back(bench: Bench) -> None:
    for name in ("a", "b"):
        bench.client(name, add_one)
    bench.transport.call_roll()
    for _ in range(2):
        for answer in exchanged(bench).values():
            assert isinstance(answer, Ours)
            assert answer.tensors["x"].tolist() == [3.0, 3.0]
    assert sorted(bench.said) == ["a has joined", "b has joined"]
    bench.transport.say_farewell()


def test_who_is_away_is_waited_for_and_asked_when_there(bench: Bench) -> None:
    bench.client("a", add_one)
    while "a" not in bench.transport.nodes:
        bench.transport.refresh()
    threading.Timer(0.5, lambda: bench.client("b", add_one)).start()
    assert all(isinstance(answer, Ours) for answer in exchanged(bench).values())


def test_who_stays_away_is_late(bench: Bench) -> None:
    bench.client("a", add_one)
    while "a" not in bench.transport.nodes:
        bench.transport.refresh()
    answers = exchanged(bench, deadline=4)
    assert answers["b"] == Refused("late: no answer before the deadline")
    assert isinstance(answers["a"], Ours)


def test_who_is_late_may_answer_the_next_message(bench: Bench) -> None:
    first, late = iter([True]), threading.Event()

    def slow_at_first(asked: Envelope) -> Envelope:
        if asked.frame and next(first, False):
            late.wait(60)
        return add_one(asked)

    bench.client("a", add_one)
    bench.client("b", slow_at_first)
    bench.transport.call_roll()
    assert exchanged(bench, deadline=1)["b"] == Refused("late: no answer before the deadline")
    late.set()
    assert isinstance(exchanged(bench)["b"], Ours)
    assert not bench.state.message_res_store, "what came too late is not kept"


def test_a_client_that_starts_anew_is_asked_again(bench: Bench) -> None:
    """The first process takes the message with it."""
    bench.client("a", add_one)
    first = bench.client("b", lambda asked: None)

    def again() -> None:
        first.join()
        bench.client("b", add_one)

    threading.Thread(target=again, daemon=True).start()
    assert all(isinstance(answer, Ours) for answer in exchanged(bench).values())
    assert "b is back" in bench.said


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of clients whose next answer breaks off after it has been announced; each breaks once."""
    names: list[str] = []

    def push(parts: Any, *rest: Any, **more: Any) -> None:
        name = threading.current_thread().name
        if name in names and len(parts) > 1:
            names.remove(name)
            raise httpx.ReadError("the process has died")
        push_objects(parts, *rest, **more)

    monkeypatch.setattr(supernode, "push_objects", push)
    return names


def test_an_answer_that_breaks_off_holds_nobody_up(bench: Bench, breaking: list[str]) -> None:
    """Its client dies between two parts of it, and another process of it is asked again."""
    bench.client("a", add_one)
    first = bench.client("b", add_one)
    bench.transport.call_roll()
    breaking.append(first.name)

    def again() -> None:
        first.join()
        bench.client("b", add_one)

    threading.Thread(target=again, daemon=True).start()
    assert all(isinstance(answer, Ours) for answer in exchanged(bench).values())
    assert "b is back" in bench.said


def test_an_answer_that_breaks_off_is_late(bench: Bench, breaking: list[str]) -> None:
    """Nothing but the deadline ends the wait where its client does not come back."""
    bench.client("a", add_one)
    client = bench.client("b", add_one)
    bench.transport.call_roll()
    breaking.append(client.name)
    answers = exchanged(bench, deadline=4)
    assert isinstance(answers["a"], Ours)
    assert answers["b"] == Refused("late: no answer before the deadline")


def test_a_client_that_ends_every_time_is_given_up(bench: Bench) -> None:
    bench.client("a", add_one)

    def dying() -> None:
        for _ in range(5):
            bench.client("b", lambda asked: None).join()

    threading.Thread(target=dying, daemon=True).start()
    answers = exchanged(bench, deadline=60)
    assert answers["b"] == Refused("ended 3 times before it had answered")
    assert isinstance(answers["a"], Ours)


def test_rubbish_and_replays_are_refused_and_the_others_go_on(bench: Bench) -> None:
    kept: list[Envelope] = []

    def replaying(asked: Envelope) -> Envelope:
        kept.append(add_one(asked))
        return kept[0]

    bench.client("a", replaying)
    bench.client("b", lambda asked: replace(add_one(asked), frame=add_one(asked).frame[:-2]))
    bench.transport.call_roll()
    first, second = exchanged(bench), exchanged(bench)
    assert isinstance(first["a"], Ours)
    assert "replayed" in second["a"].reason  # type: ignore[union-attr]
    assert isinstance(first["b"], Refused)


def spoilt(asked: Envelope, how: str) -> Envelope:
    """An answer with something wrong in it."""
    frame = bytearray(add_one(asked).frame)
    if how == "flipped":
        frame[len(frame) // 2] ^= 255
    elif how == "cut":
        del frame[-3:]
    elif how == "huge":
        frame += bytes(2**20 * 10)
    else:
        tensors = {
            "nan": {"x": torch.full((2,), torch.nan)},
            "shape": {"x": torch.ones(3)},
            "name": {"y": torch.ones(2)},
        }
        frame = bytearray(FLOAT32.encode(Ours(tensors[how], {"examples": 1})))
    return replace(asked, frame=bytes(frame))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("nan", "holds 2 values that are not finite"),
        ("shape", "has shape (3,), expected (2,)"),
        ("name", "unexpected tensor 'y'"),
        ("flipped", "damaged message"),
        ("cut", "damaged message"),
    ],
)
def test_a_bad_update_is_refused_and_named(bench: Bench, how: str, said: str) -> None:
    bench.client("a", add_one)
    bench.client("b", lambda asked: spoilt(asked, how) if asked.frame else asked)
    answers = exchanged(bench)
    assert said in answers["b"].reason  # type: ignore[union-attr]
    assert isinstance(answers["a"], Ours)


def test_an_update_of_ten_times_the_limit_does_not_arrive(bench: Bench) -> None:
    """Its sender hears of it, and the round goes on without it."""
    bench.client("a", add_one)
    bench.client("b", lambda asked: spoilt(asked, "huge") if asked.frame else asked)
    answers = exchanged(bench, deadline=5)
    assert isinstance(answers["b"], Refused)
    assert isinstance(answers["a"], Ours)
    assert any("refused b (" in line and "a message of more than 1048576 bytes" in line for line in bench.said)


def test_who_means_something_else_is_refused_and_told(bench: Bench) -> None:
    told: list[Envelope] = []
    bench.client("a", lambda asked: told.append(asked) or asked, digest="another")
    deadline = time.monotonic() + 20
    while not told and time.monotonic() < deadline:
        bench.transport.refresh()
    assert told[0].refusal == "it means another experiment"
    assert "refused a: it means another experiment" in bench.said
    assert "a" not in bench.transport.nodes


def test_a_key_that_the_server_does_not_know_cannot_connect(bench: Bench) -> None:
    stranger = keys.new_key()
    client = open_client(f"127.0.0.1:{bench.address[1]}", None, stranger)
    with pytest.raises(httpx.HTTPStatusError) as caught:
        connect(client, stranger)
    assert caught.value.response.status_code == 401
    assert "its key is none of the clients'" in bench.said[-1]


# ---- what a client makes of it


def trouble(error: Exception, plain: bool = False, connected: bool = False) -> None:
    with _Trouble("server:1", plain) as watch:
        watch.connected = connected
        raise error


def response(status: int, behind: float = 0.0) -> httpx.HTTPStatusError:
    date = (datetime.now(UTC) - timedelta(seconds=behind)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    request = httpx.Request("POST", "http://server")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(status, headers={"date": date}))


@pytest.mark.parametrize(
    ("behind", "said"),
    [
        (0, "it does not know the key in client.key"),
        (4000, r"clock is 40\d\d s ahead of the server's"),
        (-4000, r"clock is (40|39)\d\d s behind the server's"),
    ],
)
def test_what_no_waiting_mends_is_said(behind: float, said: str) -> None:
    with pytest.raises(InputError, match=said):
        trouble(response(401, behind))


def test_a_server_that_has_started_anew_is_joined_again() -> None:
    """It does not know the numbers that it gave out before."""
    with pytest.raises(Unreachable, match="it has started anew"):
        trouble(response(401), connected=True)


@pytest.mark.parametrize("error", [response(503), httpx.ConnectError("refused"), httpx.ReadTimeout("slow")])
def test_what_waiting_may_mend_is_waited_for(error: Exception) -> None:
    with pytest.raises(Unreachable):
        trouble(error)


def test_tls_troubles_are_told_apart() -> None:
    verification = ssl.SSLCertVerificationError(1, "x")
    verification.verify_message = "certificate has expired"
    broken = httpx.ConnectError("x")
    broken.__cause__ = verification
    with pytest.raises(InputError, match=r"not the federation's server: .*\(certificate has expired\)"):
        trouble(broken)
    plain = httpx.ConnectError("x")
    plain.__cause__ = ssl.SSLError(1, "x")
    with pytest.raises(InputError, match="does not speak TLS"):
        trouble(plain)
    with pytest.raises(Unreachable, match="hears plain text"):
        trouble(httpx.RemoteProtocolError("x"), plain=True)


def test_patience_grows_and_says_since_when() -> None:
    said: list[str] = []
    slept: list[float] = []
    patience = Patience("server:1", said.append, slept.append)
    for _ in range(8):
        patience.wait("refused")
    assert slept == [1, 2, 4, 8, 16, 32, 60, 60]
    assert len({line.split(" (")[0] for line in said}) == 1, "since when does not move"
    patience.reached()
    patience.wait("refused")
    assert slept[-1] == 1


def test_a_client_that_the_server_does_not_know_ends(tmp_path: Path, bench: Bench) -> None:
    hospital = open_hospital(founded(tmp_path / "d")[1])
    settings = hospital.settings.model_copy(update={"server": f"127.0.0.1:{bench.address[1]}"})
    with pytest.raises(InputError, match="it does not know the key"):
        attend(replace(hospital, settings=settings), insecure=True, tell=lambda line: None)


# ---- a client's answers


@pytest.fixture
def attendant(tmp_path: Path) -> Attendant:
    return Attendant(open_hospital(founded(tmp_path / "d", spoken_of())[1]), lambda line: None)


def asked(attendant: Attendant, envelope: Envelope, kind: str) -> Envelope:
    message = Message(content=envelope.sealed(), dst_node_id=7, message_type=kind)
    message.metadata.__dict__["_message_id"] = f"m{next(NUMBERS)}"
    return Envelope.opened(attendant.answer(message).content)


NUMBERS = itertools.count()


def test_a_client_answers_what_was_agreed_on_and_refuses_the_rest(attendant: Attendant) -> None:
    own = attendant.hospital.agreement.digest
    envelope = Envelope("site-01", own, "t")
    word = asked(attendant, envelope, ROLL_CALL)
    assert Joining.model_validate_json(word.frame) == attendant.hospital.said
    assert "a kind that this client does not answer" in asked(attendant, envelope, "query.files").refusal
    assert "is another one" in asked(attendant, replace(envelope, experiment="x"), ANSWER).refusal
    assert "the message is for 'site-02'" in asked(attendant, replace(envelope, client="site-02"), ANSWER).refusal
    assert asked(attendant, replace(envelope, frame=b"rubbish"), ANSWER).refusal
    assert not attendant.over
    assert not asked(attendant, envelope, FAREWELL).refusal
    assert attendant.over
    assert not attendant.outcast


def test_a_client_of_another_experiment_is_an_outcast(attendant: Attendant) -> None:
    assert asked(attendant, Envelope("site-01", "x", "t"), ROLL_CALL).refusal
    assert "the server's experiment is another one" in attendant.outcast


def test_a_full_disk_costs_an_answer_and_not_the_client(attendant: Attendant, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(client: str, frame: bytes) -> bytes:
        raise OSError(28, "No space left on device", "/state")

    monkeypatch.setattr(attendant.hospital.answerer, "answer", full)
    envelope = Envelope("site-01", attendant.hospital.agreement.digest, "t", b"frame")
    assert asked(attendant, envelope, ANSWER).refusal == "/state: No space left on device"
    assert not attendant.over


# ---- status


def test_the_status_is_that_of_the_last_word_from_each(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "status.json", ["a", "b"], 5, lambda: ["a"])
    board.round_started(2, ["a", "b"])
    board.answered(2, "train", "a", x(1.0))
    board.answered(2, "train", "b", Refused("late"))
    board.write()
    found = read_status(tmp_path)
    assert (found["state"], found["round"], found["rounds"]) == ("running", 2, 5)
    assert found["clients"]["a"]["connected"]
    assert not found["clients"]["b"]["connected"]
    assert "round 2, train: refused, late" in status_text(found)
    board.end("finished")
    assert read_status(tmp_path)["state"] == "finished"
    with pytest.raises(InputError, match="no server has run in this folder"):
        read_status(tmp_path / "other")
