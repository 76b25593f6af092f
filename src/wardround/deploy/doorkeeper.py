"""What stands between the network and Flower's Fleet API: nothing else is let through, and refusals are said aloud."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, MutableMapping
from datetime import UTC, datetime
from typing import Any

from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

Scope = MutableMapping[Any, Any]
Tell = Callable[[str], None]
FLEET = "/v1/fleet/"
REPEAT_SECONDS = 60.0  # how long the same refusal is not said again
TOO_LARGE = 413
CLOCK_SECONDS = 60.0  # further apart than this, clocks are named as a possible cause


class TooLarge(Exception):
    """A request's body is larger than any message of this federation."""


class Doorkeeper:
    """Wraps an ASGI app.

    Args:
        app: serves what is let through.
        limit: the most bytes of a request.
        known: the clients' public keys in PEM, by name.
        tell: takes a sentence about each refusal.
    """

    def __init__(self, app: Any, limit: int, known: MutableMapping[str, bytes], tell: Tell) -> None:
        self._app, self._limit, self._tell = app, limit, tell
        self._names = {key.strip(): name for name, key in known.items()}
        self._said: dict[str, float] = {}

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not scope["path"].startswith(FLEET):
            self.say(f"refused {_peer(scope)}: asked for {scope['path'][:100]!r}, which is not served here")
            await _answer(send, 404)
            return
        if _key(scope) not in self._names:
            self.say(f"refused {self._who(scope)}: {self._why(scope)}")
            await _answer(send, 401)
            return
        try:
            await self._app(scope, self._measured(scope, receive), self._watched(scope, send))
        except TooLarge:
            await _answer(send, TOO_LARGE)

    def say(self, sentence: str) -> None:
        """Tell it, unless it has just been told."""
        now = time.monotonic()
        if now - self._said.get(sentence, -REPEAT_SECONDS) >= REPEAT_SECONDS:
            self._said[sentence] = now
            self._tell(sentence)

    def _measured(self, scope: Scope, receive: Any) -> Any:
        got = 0

        async def limited() -> Any:
            nonlocal got
            event = await receive()
            got += len(event.get("body", b""))
            if got > self._limit:
                self.say(f"refused {self._who(scope)}: a message of more than {self._limit} bytes")
                scope[TooLarge] = True
                raise TooLarge
            return event

        return limited

    def _watched(self, scope: Scope, send: Any) -> Any:
        async def watching(event: Any) -> None:
            if event["type"] == "http.response.start":
                if event["status"] == 401:
                    self.say(f"refused {self._who(scope)}: {self._why(scope)}")
                event = {**event, "status": TOO_LARGE} if TooLarge in scope else event
            await send(event)

        return watching

    def _who(self, scope: Scope) -> str:
        name = self._names.get(_key(scope))
        return f"{name} ({_peer(scope)})" if name else _peer(scope)

    def _why(self, scope: Scope) -> str:
        key = _key(scope)
        if not key:
            return "it shows no key"
        if key not in self._names:
            return f"its key is none of the clients' (SHA-256 {hashlib.sha256(key).hexdigest()[:16]})"
        apart = _seconds_apart(_header(scope, TIMESTAMP_HEADER))
        if apart is None or abs(apart) < CLOCK_SECONDS:
            return "its session is of an earlier start of this server, or its signature is not that of its key"
        return f"its clock is {abs(apart):.0f} s {'behind' if apart > 0 else 'ahead of'} this machine's"


def _peer(scope: Scope) -> str:
    host, port = scope.get("client") or ("unknown", 0)
    return f"{host}:{port}" if port else str(host)


def _header(scope: Scope, name: str) -> bytes:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    return headers.get(name.lower().encode(), b"")


def _key(scope: Scope) -> bytes:
    try:
        return base64.b64decode(_header(scope, FLEET_HTTP_PUBLIC_KEY_HEADER), validate=True).strip()
    except binascii.Error:
        return b""


def _seconds_apart(stamp: bytes) -> float | None:
    """How far a client's time is behind this machine's."""
    try:
        then = datetime.fromisoformat(stamp.decode("ascii"))
    except ValueError:
        return None
    return (datetime.now(UTC) - then).total_seconds() if then.tzinfo else None


async def _answer(send: Any, status: int) -> None:
    with contextlib.suppress(Exception):  # it may have begun already, or nobody may be there any more
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


class _Handshakes(logging.Handler):
    """Tells of connections that do not get as far as a request: plain text, a client that distrusts the server."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(logging.DEBUG)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Look at a record of asyncio's."""
        error = record.exc_info[1] if record.exc_info else None
        if "SSL handshake failed" in record.getMessage():
            reason = getattr(error, "reason", None) or type(error).__name__
            words = {"HTTP_REQUEST": "plain text, where TLS is spoken"}
            self._tell(f"refused a connection before its first request: {words.get(reason, reason)}")


@contextlib.contextmanager
def telling_of_handshakes(tell: Tell) -> Iterator[None]:
    """While it lasts, failed handshakes are told. asyncio speaks of them in its debug mode alone."""
    logger, handler = logging.getLogger("asyncio"), _Handshakes(tell)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def talkative_loop() -> None:
    """Put the running loop into debug mode, but for its warnings of slow callbacks."""
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = float("inf")
