"""The server's end of Flower, in the process of the server itself: its Fleet API, and nothing else of it.

Flower's own SuperLink serves the Fleet, Control and Runtime APIs on one port. Whoever reaches the Control API may
register keys of his own and start programs, so none of it is served here: what reaches this port can do no more than
a hospital's node can, and only with a hospital's key.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from flwr.app import Message
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.proto.runtime_pb2 import GetNodesRequest
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.error import http_error_translator
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import HttpGrid
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from flwr.superlink.routers.fleet.router import router as fleet_router
from flwr.superlink.servicer.runtime import runtime_handlers
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware

TASK_HEARTBEAT_SECONDS = 20.0


class LinkState(InMemoryLinkState):
    """Flower's state, which knows the clients by their keys and notices when one has started anew.

    Args:
        keys: each client's public key in PEM.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        super().__init__(NoOpFederationManager(), InMemoryObjectStore())
        self.clients = {
            self.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0.0, name=name): name for name, key in keys.items()
        }
        self.numbers = {name: node for node, name in self.clients.items()}
        self.starts = dict.fromkeys(self.clients, 0)  # how often each node has begun

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        """Let a node begin. What an earlier process of it was sent has died with that process."""
        if node_id in self.starts:
            self.deactivate_node(node_id)
            self.starts[node_id] += 1
        return super().activate_node(node_id, heartbeat_interval)

    def arriving(self, name: str) -> bool:
        """Whether a reply to the message `name` has been announced, and is not here as a whole yet."""
        reply = self.message_ins_id_to_message_res_id.get(name)
        return reply is not None and not self._is_whole(reply)

    def _is_whole(self, name: str) -> bool:
        try:
            parts = iterate_object_tree(self.object_store.get_object_tree(name))
        except NoObjectInStoreError:
            return False
        return all(self.object_store.get(part.object_id) for part in parts)

    def state(self) -> LinkState:
        """Itself: Flower asks a factory for its state."""
        return self


@dataclass
class Run:
    """The one run of this server, which Flower keeps as long as somebody vouches for it."""

    state: LinkState
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Begin it."""
        self.run_id = self.state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        self.info = self.state.get_run_info(run_ids=[self.run_id])[0]
        self.task_id = int(self.info.primary_task_id or 0)
        self.state.claim_task(self.task_id)
        self.state.activate_task(self.task_id)
        self.task = self.state.get_tasks(task_ids=[self.task_id])[0]
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = self.task_id, self.run_id, SUPERLINK_NODE_ID
        threading.Thread(target=self._vouch, name="run-heartbeat", daemon=True).start()

    def end(self) -> None:
        """Stop vouching for it."""
        self._ended.set()

    def _vouch(self) -> None:
        while not self._ended.wait(TASK_HEARTBEAT_SECONDS):
            self.state.acknowledge_task_heartbeat(self.task_id)


class _Direct:
    """The calls that `HttpGrid` makes over HTTP, made within this process."""

    HANDLERS: Mapping[str, Callable[..., Any]] = {
        "GetNodes": runtime_handlers.get_nodes,
        "PushMessages": runtime_handlers.push_messages,
        "PullMessages": runtime_handlers.pull_messages,
        "PushObject": runtime_handlers.push_object,
        "PullObject": runtime_handlers.pull_object,
        "ConfirmMessageReceived": runtime_handlers.confirm_message_received,
    }

    def __init__(self, run: Run) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        handler = self.HANDLERS[name]
        return lambda request: handler(request, self._run.state, self._run.task)


class LinkGrid(HttpGrid):
    """Flower's grid over the state in this process.

    Args:
        run: whose messages it carries.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(token="unused")
        self.state = run.state
        self._client = _Direct(run)  # type: ignore[assignment]
        self.set_run(run.info)

    def connected(self) -> dict[str, int]:
        """Flower's number for every client that is connected."""
        nodes = self._runtime_client.GetNodes(GetNodesRequest()).nodes
        return {self.state.clients[node.node_id]: node.node_id for node in nodes if node.node_id in self.state.clients}

    def starts(self, client: str) -> int:
        """How often `client` has connected as a new process."""
        return self.state.starts[self.state.numbers[client]]

    def forget(self, names: Iterable[str]) -> None:
        """Drop messages whose answers nobody waits for any more."""
        gone = set(names)
        self.state.delete_messages(gone)
        for name in gone:
            self.state.object_store.delete(name)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are here as a whole.

        Flower's own waits, for hours, for the rest of a reply whose sender has died while it sent; nobody else could
        be heard meanwhile, and no deadline could pass.
        """
        return super().pull_messages([name for name in message_ids if not self.state.arriving(name)])

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages; Flower's names for them, empty for one that cannot be sent."""
        return [name for name in super().push_messages(messages) if name]


def fleet_app(state: LinkState) -> FastAPI:
    """Flower's Fleet API alone, for nodes whose keys `state` knows."""
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
            Middleware(ProtobufTranslationMiddleware),
            Middleware(NodeAuthMiddleware),
        ],
    )
    app.state.linkstate_factory = state
    app.state.enable_supernode_auth = True  # nobody registers a key over the network
    app.include_router(fleet_router)
    return app


def quiet() -> None:
    """Leave Flower's own log to its errors."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
