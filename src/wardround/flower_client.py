"""The client half under Flower: a ClientApp that answers this package's messages with the one client function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from wardround import run_folder
from wardround.answering import Answerer
from wardround.config import load_experiment
from wardround.errors import InputError
from wardround.experiment import STATE, make_answerer, set_up
from wardround.federation.flower import ANSWER, ROLL_CALL, Correspondent, Envelope
from wardround.federation.journal import Journal


@dataclass(frozen=True)
class Residence:
    """Where a client half lives.

    Attributes:
        folder: of the run; its `config.toml` has nothing that is `auto`.
        processes: how many share the memory for caches and state.
    """

    folder: Path
    processes: int = 1


_RESIDENTS: dict[Residence, tuple[Answerer, str]] = {}  # of this process, with the digests of their experiments


def resident(residence: Residence) -> tuple[Answerer, str]:
    """The answerer that lives there, made when first needed and kept while this process lives."""
    if residence not in _RESIDENTS:
        setup = set_up(load_experiment(residence.folder / run_folder.CONFIG))
        journal = Journal(residence.folder / STATE)
        answerer = make_answerer(setup, residence.folder, None, residence.processes, journal)
        _RESIDENTS[residence] = (answerer, setup.experiment.digest())
    return _RESIDENTS[residence]


def client_app(residence: Residence | None = None) -> ClientApp:
    """A ClientApp that answers with the client half that lives at `residence`, or where its context says."""
    app = ClientApp()

    @app.query(ROLL_CALL.partition(".")[2])
    def roll_call(message: Message, context: Context) -> Message:
        return _reply(message, lambda envelope: _named(residence or residence_of(context), context, envelope))

    @app.query(ANSWER.partition(".")[2])
    def answer(message: Message, context: Context) -> Message:
        return _reply(message, lambda envelope: _answered(residence or residence_of(context), context, envelope))

    return app


def residence_of(context: Context) -> Residence:
    """Where a node's client half lives: `folder` of its own configuration, or the run's `out` on a shared disk."""
    return Residence(Path(str(context.node_config.get("folder") or context.run_config["out"])))


def client_of(context: Context, names: tuple[str, ...]) -> str:
    """The client that a node is: `client` of its configuration, or, in a simulation, its partition.

    Raises:
        InputError: none of `names`.
    """
    given = context.node_config.get("client")
    if given is None:
        return names[int(context.node_config["partition-id"])]
    if given not in names:
        raise InputError(f"client={given!r}: the experiment has no such client (it has {', '.join(names)})")
    return str(given)


def _reply(message: Message, answer: Callable[[Envelope], Envelope]) -> Message:
    """What `answer` says, or why it cannot say it."""
    envelope = Envelope.opened(message.content)
    try:
        found = answer(envelope)
    except InputError as error:
        found = replace(envelope, frame=b"", refusal=str(error))
    return Message(content=found.sealed(), reply_to=message)


def _named(residence: Residence, context: Context, asked: Envelope) -> Envelope:
    correspondent, _ = _correspondent(residence, context)
    wrong = correspondent.other_experiment(asked)
    return correspondent.refuse(asked, wrong) if wrong else correspondent.reply(asked)


def _answered(residence: Residence, context: Context, asked: Envelope) -> Envelope:
    correspondent, answerer = _correspondent(residence, context)
    return correspondent.answer(asked, answerer)


def _correspondent(residence: Residence, context: Context) -> tuple[Correspondent, Answerer]:
    answerer, digest = resident(residence)
    return Correspondent(client_of(context, answerer.federation.names), digest), answerer
