"""The server's port: a thread that serves the Fleet API with TLS while the round loop runs."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from wardround.deploy.doorkeeper import Doorkeeper, Tell, talkative_loop, telling_of_handshakes
from wardround.deploy.superlink import LinkState, fleet_app
from wardround.errors import InputError, RunError

START_SECONDS = 20.0


@contextlib.contextmanager
def listening(
    state: LinkState, keys: dict[str, bytes], address: tuple[str, int], certificate: Path | None, limit: int, tell: Tell
) -> Iterator[None]:
    """Serve `state` while the block lasts.

    Args:
        state: Flower's.
        keys: the clients' public keys.
        address: host and port.
        certificate: file of the server's certificate, its key beside it; None for plain text.
        limit: the most bytes of a request.
        tell: takes a sentence about each refusal.

    Raises:
        InputError: the port is in use, or the address is not this machine's.
    """
    door = Doorkeeper(_talkative(fleet_app(state)), limit, keys, tell)
    tls: dict[str, Any] = {}
    if certificate is not None:
        tls = {"ssl_certfile": str(certificate), "ssl_keyfile": str(certificate.with_suffix(".key"))}
    config = uvicorn.Config(
        door,
        ws="none",
        log_level="critical",
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
        **tls,
    )
    with bound(address) as sock, telling_of_handshakes(door.say):
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="fleet-api", daemon=True)
        thread.start()
        try:
            _wait_for(server, thread)
            yield
        finally:
            server.should_exit = True
            thread.join(timeout=10)


def _talkative(app: FastAPI) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        talkative_loop()
        yield

    app.router.lifespan_context = lifespan
    return app


def _wait_for(server: uvicorn.Server, thread: threading.Thread) -> None:
    end = time.monotonic() + START_SECONDS
    while not server.started:
        if not thread.is_alive() or time.monotonic() > end:
            raise RunError("the server's port did not open")
        time.sleep(0.02)


@contextlib.contextmanager
def bound(address: tuple[str, int]) -> Iterator[socket.socket]:
    """A socket that is bound to host and port.

    Raises:
        InputError: the port is in use, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            raise InputError(
                f"server.toml: cannot listen on {address[0]}, port {address[1]} ({error.strerror or error}); "
                "another process may have the port, or `listen` is no address of this machine"
            ) from error
        yield sock
