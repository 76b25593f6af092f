"""`deploy server`: the round loop of one experiment, for clients that come over the network."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wardround.config import Experiment
from wardround.deploy.agreement import Agreement, read_agreement, read_options
from wardround.deploy.authority import check_dates
from wardround.deploy.founding import CERTIFICATE, client_keys
from wardround.deploy.joining import federation_elsewhere, frozen_digest, objection
from wardround.deploy.settings import RUN, SERVER, ServerSettings, is_loopback
from wardround.deploy.status import STATUS, StatusBoard
from wardround.errors import InputError, RunError
from wardround.experiment import Setup, build_model, run
from wardround.federation.checkpoints import Checkpoint
from wardround.federation.codecs import codec_named
from wardround.federation.flower_setup import need_flower
from wardround.federation.messages import room_for
from wardround.federation.observers import Observer
from wardround.federation.transport import Transport
from wardround.methods.base import ServerSide

SPARE_BYTES = 2**20  # what Flower wraps around a message


@dataclass(frozen=True)
class Post:
    """A server that is ready to listen.

    Attributes:
        folder: of the server, as `deploy init` made it.
        agreement: what all have agreed on.
        experiment: with this machine's own places in it.
        settings: the server's own.
        insecure: plain text, on this machine alone.
        side: the method bound to its model.
        frozen: digest of the network's frozen part.
    """

    folder: Path
    agreement: Agreement
    experiment: Experiment
    settings: ServerSettings
    insecure: bool
    side: ServerSide
    frozen: str

    @property
    def certificate(self) -> Path | None:
        """The file of the certificate; None for plain text."""
        return None if self.insecure else self.folder / CERTIFICATE

    @property
    def limit(self) -> int:
        """The most bytes of one request."""
        phases = (*self.side.phases(1), *self.side.closing_phases())
        return max(room_for(self.side.reply_schema(phase)) for phase in phases) + SPARE_BYTES


def prepare(folder: Path, insecure: bool) -> Post:
    """Read a server's folder.

    Raises:
        InputError: a file is missing or wrong, the certificate has expired, or plain text would leave this machine.
    """
    settings, agreement = read_options(folder / SERVER, ServerSettings), read_agreement(folder)
    if insecure and not is_loopback(settings.listen):
        raise InputError(
            f"{folder / SERVER}: --insecure sends plain text, which is for this machine alone: "
            f'listen = "127.0.0.1", found {settings.listen!r}'
        )
    if not insecure:
        check_dates(folder / CERTIFICATE)
    experiment = agreement.experiment
    if settings.pretrained is not None:
        weights = str((folder / settings.pretrained).resolve())
        experiment = experiment.changed({"model.pretrained": weights}, str(folder / SERVER))
    method, model = build_model(experiment, agreement.parties.classes, agreement.parties.modalities)
    side = ServerSide(method, model, experiment.data.image_size)
    return Post(folder, agreement, experiment, settings, insecure, side, frozen_digest(side, model))


def serve(
    folder: Path, insecure: bool, tell: Callable[[str], None], observers: tuple[Observer, ...] = ()
) -> dict[str, Any]:
    """Run the experiment of a server's folder, or go on with it; its `results.json`.

    Args:
        folder: as `deploy init` made it.
        insecure: plain text instead of TLS; for this machine alone.
        tell: takes sentences about who comes, goes and is refused.
        observers: told of every event.

    Raises:
        InputError: the folder is not as it should be, or the port is in use.
        RunError: a quorum was lost, or the disk is full.
    """
    tested = need_flower()
    if tested:
        tell(tested)
    with _flower_trouble():
        from wardround.deploy.superlink import LinkGrid, LinkState, Run, quiet
        from wardround.deploy.transport import HospitalTransport
    quiet()
    post = prepare(folder, insecure)
    parties = post.agreement.parties
    keys = client_keys(folder, parties.clients)
    state = LinkState(keys)
    flower_run = Run(state)
    grid = LinkGrid(flower_run)
    board = StatusBoard(folder / STATUS, parties.clients, post.experiment.rounds, lambda: list(grid.connected()))
    check = functools.partial(objection, agreement=post.agreement, frozen=post.frozen)
    transport = HospitalTransport(
        codec_named(post.experiment.transport.codec), grid, parties.clients, post.agreement.digest, check, tell
    )
    with _on(board, flower_run), _port(post, state, keys, tell):
        transport.call_roll()
        federation = federation_elsewhere(post.agreement, transport.roll.said)
        results = run(
            post.experiment, folder / RUN, resume=True, observers=[board, *observers], federation=federation,
            connect=functools.partial(_connected, transport),
        )  # fmt: skip
        transport.say_farewell()
    return results


def _connected(transport: Transport, setup: Setup, folder: Path, checkpoint: Checkpoint | None) -> Transport:
    return transport


@contextlib.contextmanager
def _port(post: Post, state: Any, keys: dict[str, bytes], tell: Callable[[str], None]) -> Iterator[None]:
    from wardround.deploy.listening import listening

    settings = post.settings
    with listening(state, keys, (settings.listen, settings.port), post.certificate, post.limit, tell):
        how = "plain text, on this machine alone" if post.insecure else "TLS"
        tell(f"listening on {settings.listen}, port {settings.port} ({how}); waiting for {', '.join(keys)}")
        yield


@contextlib.contextmanager
def _on(board: StatusBoard, run: Any) -> Iterator[None]:
    """Say at the end how it ended."""
    try:
        yield
        board.end("finished")
    except KeyboardInterrupt:
        board.end("stopped")
        raise
    except BaseException:
        board.end("failed")
        raise
    finally:
        run.end()


@contextlib.contextmanager
def _flower_trouble() -> Iterator[None]:
    """Another version of Flower may lack what is used here."""
    try:
        yield
    except ImportError as error:
        from wardround.federation.flower_setup import tested_versions

        raise RunError(
            f"this version of Flower lacks what `deploy` needs ({error}); tested: {tested_versions()}"
        ) from error
