"""Sites that never train, judged by what the others share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from wardround.answering import Answerer
from wardround.data import Federation
from wardround.evaluation.results import client_results
from wardround.federation.messages import Message, named
from wardround.federation.rounds import EVALUATE
from wardround.federation.server import Server

HELD_OUT = "held-out"  # the folder of their predictions
MakeAnswerer = Callable[[Federation], Answerer]


class HeldOut:
    """The held-out sites of a federation.

    It must be made before anything trains: what local entries the model has then stand in for a client's own.

    Args:
        federation: with its held-out sites.
        make: an answerer for these sites, as if they were clients.
    """

    def __init__(self, federation: Federation, make: MakeAnswerer) -> None:
        self._names = tuple(site.name for site in federation.held_out)
        sites = replace(federation, clients=federation.held_out, held_out=())
        self._answerer = make(sites) if self._names else None

    def results(self, server: Server) -> dict[str, Any] | None:
        """Per site its entry in `results.json`; None without such sites, empty where what is shared cannot predict."""
        if self._answerer is None:
            return None
        if not self._answerer.method.predicts_alone(self._answerer.model):
            return {}
        message = self._message(server)
        return {name: client_results([self._answerer.judge(name, message)], 0) for name in self._names}

    def _message(self, server: Server) -> Message:
        """The server's model and targets, but for a method that has others for every client."""
        assert self._answerer is not None
        side, scalars = self._answerer.side, {"round": server.round, "phase": EVALUATE}
        state = named("state", server.state) if side.individual else side.outgoing(server, "", EVALUATE)
        return Message(state, scalars)
