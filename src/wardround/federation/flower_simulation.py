"""Flower's simulation: ClientApps in Ray's processes, for as long as the server needs them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from wardround.errors import RunError
from wardround.federation.codecs import Codec
from wardround.federation.flower import FlowerTransport

START_SECONDS = 300.0


@dataclass
class Simulation:
    """Flower's simulation, in a thread of its own.

    Flower calls the server, while our round loop calls the transport. So the server that Flower gets hands over its
    grid and then waits until it is told to end.

    Attributes:
        app: answers for every node.
        nodes: how many there are; node i has the partition i.
        workers: processes that they share.
    """

    app: ClientApp
    nodes: int
    workers: int
    _grids: queue.Queue[Grid | BaseException] = field(default_factory=queue.Queue)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> Grid:
        """Start it, and wait for its grid.

        Raises:
            RunError: it does not start.
        """
        logging.getLogger("flwr").setLevel(logging.ERROR)
        self._thread = threading.Thread(target=self._live, name="flower-simulation", daemon=True)
        self._thread.start()
        try:
            grid = self._grids.get(timeout=START_SECONDS)
        except queue.Empty as error:
            raise RunError(f"Flower's simulation did not start within {START_SECONDS:g} s") from error
        if isinstance(grid, BaseException):
            raise RunError(f"Flower's simulation did not start ({grid})") from grid
        return grid

    def end(self) -> None:
        """End it, and wait for that."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _live(self) -> None:
        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            self._grids.put(grid)
            self._ended.wait()

        ray = {"num_cpus": self.workers, "_node_ip_address": "127.0.0.1", "include_dashboard": False}
        resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": ray}
        try:
            run_simulation(server, self.app, self.nodes, backend_config=resources)  # type: ignore[arg-type]
        except BaseException as error:  # whatever it is, the thread that waits must hear of it
            self._grids.put(error)


class SimulatedClients(FlowerTransport):
    """Clients in Flower's simulation, which begins and ends with this transport.

    Args:
        codec: how messages become bytes.
        clients: all names; node i is client i.
        experiment: the digest that clients must have as well.
        simulation: not started yet.
    """

    def __init__(self, codec: Codec, clients: Sequence[str], experiment: str, simulation: Simulation) -> None:
        self.simulation = simulation
        super().__init__(codec, simulation.start(), clients, experiment)
        try:
            self.call_roll()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the simulation."""
        self.simulation.end()
