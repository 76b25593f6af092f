"""`deploy client`: take part in the federation until it is over, whatever happens to the network or the server."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import httpx

from wardround.deploy.authority import PrivateKey, check_dates, read_private
from wardround.deploy.founding import CA, CLIENT_KEY
from wardround.deploy.hospital import Hospital
from wardround.deploy.settings import ClientSettings, is_loopback
from wardround.errors import InputError
from wardround.federation.messages import shorten

if TYPE_CHECKING:
    from flwr.app import Message

    from wardround.deploy.supernode import Link
    from wardround.federation.flower import Correspondent, Envelope

Tell = Callable[[str], None]
BACK_OFF = (1.0, 60.0)  # seconds between two attempts to reach the server: at first, and at most
CLOCK_SECONDS = 60.0


class Unreachable(Exception):
    """The server cannot be reached now; it may be later."""


@dataclass
class Patience:
    """Attempts to reach a server that is away.

    Attributes:
        address: of the server.
        tell: takes a sentence about each attempt.
        sleep: waits for so many seconds.
    """

    address: str
    tell: Tell
    sleep: Callable[[float], None] = time.sleep
    _since: datetime | None = None
    _pause: float = BACK_OFF[0]

    def wait(self, trouble: str) -> None:
        """Wait before the next attempt, longer each time."""
        self._since = self._since or datetime.now().astimezone()
        self.tell(
            f"{self.address} cannot be reached since {self._since:%Y-%m-%d %H:%M:%S} ({trouble}); next attempt in "
            f"{self._pause:.0f} s"
        )
        self.sleep(self._pause)
        self._pause = min(2 * self._pause, BACK_OFF[1])

    def reached(self) -> None:
        """The server is there."""
        self._since, self._pause = None, BACK_OFF[0]


@dataclass
class Attendant:
    """Answers the server's messages for one hospital.

    Attributes:
        hospital: whose.
        tell: takes a sentence about each message.
        over: whether the server has said that all is done, or this client is none of its own.
        outcast: why this client cannot take part; empty where it can.
    """

    hospital: Hospital
    tell: Tell
    over: bool = field(default=False, init=False)
    outcast: str = field(default="", init=False)

    def answer(self, message: Message) -> Message:
        """The reply to a message; whatever is not provided for is refused, and said."""
        from flwr.app import Message

        from wardround.deploy.transport import FAREWELL
        from wardround.federation.flower import ANSWER, ROLL_CALL, Envelope

        asked = Envelope.opened(message.content)
        kinds = {ROLL_CALL: self._joins, ANSWER: self._answers, FAREWELL: self._leaves}
        found = kinds.get(message.metadata.message_type, self._refuses)(asked)
        if found.refusal:
            self.tell(f"refused: {found.refusal}")
        return Message(content=found.sealed(), reply_to=message)

    def _joins(self, asked: Envelope) -> Envelope:
        wrong = self._me.other_experiment(asked)
        if wrong:
            self.over, self.outcast = True, wrong
            return self._me.refuse(asked, wrong)
        self.tell("joined; waiting for the first message")
        return self._me.reply(asked, self.hospital.said.model_dump_json().encode())

    def _answers(self, asked: Envelope) -> Envelope:
        begun = time.monotonic()
        try:
            found = self._me.answer(asked, self.hospital.answerer)
        except OSError as error:
            found = self._me.refuse(asked, f"{error.filename or 'disk'}: {error.strerror or error}")
        if not found.refusal:
            took = time.monotonic() - begun
            self.tell(f"answered: {len(asked.frame)} bytes came, {len(found.frame)} bytes go, {took:.1f} s")
        return found

    def _leaves(self, asked: Envelope) -> Envelope:
        wrong = self._me.other_experiment(asked)
        if wrong:
            return self._me.refuse(asked, wrong)
        self.over, self.outcast = True, asked.refusal and f"the server refused this client: {shorten(asked.refusal)}"
        return self._me.reply(asked)

    def _refuses(self, asked: Envelope) -> Envelope:
        return self._me.refuse(asked, "a message of a kind that this client does not answer")

    @cached_property
    def _me(self) -> Correspondent:
        from wardround.federation.flower import Correspondent

        return Correspondent(self.hospital.settings.name, self.hospital.agreement.digest)


def attend(hospital: Hospital, insecure: bool, tell: Tell, sleep: Callable[[float], None] = time.sleep) -> None:
    """Take part until the server says that all is done.

    Args:
        hospital: ready to take part.
        insecure: plain text instead of TLS; for a server on this machine alone.
        tell: takes a sentence about each event.
        sleep: waits between attempts.

    Raises:
        InputError: the server does not know this client's key, is not the federation's server, or means another
            experiment.
    """
    from wardround.deploy.supernode import connect, open_client

    authority, key = credentials(hospital.folder, hospital.settings, insecure)
    patience = Patience(hospital.settings.server, tell, sleep)
    attendant = Attendant(hospital, tell)
    client = open_client(hospital.settings.server, authority, key)
    while not attendant.over:
        try:
            with _Trouble(hospital.settings.server, plain=insecure) as trouble:
                link = connect(client, key)
                trouble.connected = True
                patience.reached()
                tell(f"connected to {hospital.settings.server}")
                _stay(link, attendant)
        except Unreachable as trouble:
            patience.wait(str(trouble))
    if attendant.outcast:
        raise InputError(f"{hospital.folder}: {attendant.outcast}")
    tell(f"the federation is finished; this hospital's model is in {hospital.run}")


def credentials(folder: Path, settings: ClientSettings, insecure: bool) -> tuple[str | None, PrivateKey]:
    """The file of the authority's certificate (None for plain text) and this client's key.

    Raises:
        InputError: a file is missing or wrong, or plain text would leave this machine.
    """
    if insecure and not is_loopback(settings.host):
        raise InputError(f"--insecure sends plain text, which is for this machine alone; server: {settings.server}")
    if not insecure:
        check_dates(folder / CA)
    return None if insecure else str(folder / CA), read_private(folder / CLIENT_KEY)


def _stay(link: Link, attendant: Attendant) -> None:
    """Answer until all is done."""
    from wardround.deploy.supernode import Pulse

    pulse = Pulse(link.beat)
    try:
        _answer_all(link, attendant)
    finally:
        pulse.end()
    link.leave()


def _answer_all(link: Link, attendant: Attendant) -> None:
    from wardround.deploy.supernode import POLL_SECONDS

    pause = POLL_SECONDS[0]
    while not attendant.over:
        message = link.pull()
        if message is None:
            time.sleep(pause)
            pause = min(1.5 * pause, POLL_SECONDS[1])
            continue
        pause = POLL_SECONDS[0]
        if not link.push(attendant.answer(message)):
            attendant.tell("the server does not take this answer: it came too late, or is too large")


class _Trouble:
    """Turns what can go wrong on the way to the server into `Unreachable`, or into an error that no waiting mends."""

    def __init__(self, server: str, plain: bool) -> None:
        self._server, self._plain = server, plain
        self.connected = False  # whether the server has known this client since the block began

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Say what it means."""
        if isinstance(error, httpx.HTTPStatusError):
            self._answered(error.response)
        elif isinstance(error, httpx.TransportError):
            self._broken(error)
        elif type(error).__module__.startswith("flwr."):
            raise Unreachable(f"{type(error).__name__}: {error}") from error

    def _answered(self, response: httpx.Response) -> None:
        if response.status_code == 401 and not self.connected:
            raise InputError(f"{self._server} refused this client: {self._why(response)}")
        anew = "it has started anew" if response.status_code == 401 else f"status {response.status_code}"
        raise Unreachable(anew)

    def _why(self, response: httpx.Response) -> str:
        try:
            apart = (datetime.now(UTC) - parsedate_to_datetime(response.headers["date"])).total_seconds()
        except (KeyError, ValueError, TypeError):
            apart = 0.0
        if abs(apart) >= CLOCK_SECONDS:
            ahead = "ahead of" if apart > 0 else "behind"
            return f"this machine's clock is {abs(apart):.0f} s {ahead} the server's; set it"
        return f"it does not know the key in {CLIENT_KEY}; the folder may be of another federation, or of an older one"

    def _broken(self, error: httpx.TransportError) -> None:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ssl.SSLError):
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise InputError(
                f"{self._server} is not the federation's server: its certificate is not accepted "
                f"({cause.verify_message}). If it speaks of dates, look at this machine's clock too."
            ) from error
        if isinstance(cause, ssl.SSLError):
            what = getattr(cause, "reason", None) or cause
            raise InputError(
                f"{self._server} does not speak TLS ({what}); a server with --insecure does not"
            ) from error
        broke_off = isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)
        hint = "; a server that wants TLS does so when it hears plain text" if broke_off and self._plain else ""
        raise Unreachable(f"{str(error) or type(error).__name__}{hint}") from error
