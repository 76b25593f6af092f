"""A client's end of Flower: one process that keeps the hospital's model and answers messages itself.

Flower's own SuperNode runs programs that the server sends, in a new process for every message. This one runs nothing
that comes from outside, and the model stays in memory from one message to the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

POLL_SECONDS = (0.05, 0.25)  # between two looks for a message: right after one, and at most


@dataclass
class Link:
    """An open connection to the server.

    Attributes:
        client: Flower's HTTP client.
        node: Flower's name for this client.
    """

    client: FleetHttpClient
    node: Node

    def pull(self) -> Message | None:
        """The next message, if there is one."""
        found = self.client.PullMessages(PullMessagesRequest(node=self.node))
        if not found.messages_list:
            return None
        head, tree = message_from_proto(found.messages_list[0]), found.message_object_trees[0]
        name, run = head.metadata.message_id, head.metadata.run_id
        pull = make_pull_object_fn_protobuf(self.client.PullObject, self.node, run)
        try:
            contents = pull_objects([part.object_id for part in iterate_object_tree(tree)], pull)
        except ObjectPullError:  # the server has just taken it back
            return None
        self.client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=name)
        )
        message = inflate_object_from_contents(name, contents)
        assert isinstance(message, Message)
        message.metadata.__dict__["_message_id"] = name
        return message

    def push(self, reply: Message) -> bool:
        """Send a reply; False where the server does not want it any more."""
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            tree, parts = get_object_tree(reply), get_all_nested_objects(reply)
        head = message_to_proto(remove_content_from_message(reply))
        sent = self.client.PushMessages(
            PushMessagesRequest(
                node=self.node, messages_list=[head], message_object_trees=[tree], clientapp_runtime_list=[0.0]
            )
        )
        push = make_push_object_fn_protobuf(self.client.PushObject, self.node, reply.metadata.run_id, sent.session_id)
        try:
            push_objects(parts, push, object_ids_to_push=set(sent.objects_to_push))
        except ObjectPushError:
            return False
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
                return False
            raise
        return bool(sent.objects_to_push)

    def beat(self) -> bool:
        """Tell the server that this client lives; False where it does not know it any more."""
        request = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        return bool(self.client.SendNodeHeartbeat(request).success)

    def leave(self) -> None:
        """Tell the server that this client goes."""
        self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))


def open_client(address: str, authority: str | None, key: ec.EllipticCurvePrivateKey) -> FleetHttpClient:
    """Flower's HTTP client for a server.

    Args:
        address: `host:port`.
        authority: file of the certificate that the server's must be signed with; None for plain text.
        key: this client's.
    """
    public = key.public_key()
    interceptors: list[Any] = [RuntimeVersionHttpInterceptor("SuperNode"), NodeAuthHttpInterceptor(key, public)]
    return FleetHttpClient.from_server_address(address, authority is None, authority, interceptors)


def connect(client: FleetHttpClient, key: ec.EllipticCurvePrivateKey) -> Link:
    """Begin as a node of the server."""
    public = public_key_to_bytes(key.public_key())
    request = ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
    return Link(client, Node(node_id=client.ActivateNode(request).node_id))


class Pulse:
    """Heartbeats in a thread of their own, while the client trains.

    Args:
        beat: sends one.
        seconds: between two of them.
    """

    def __init__(self, beat: Callable[[], object], seconds: float = HEARTBEAT_DEFAULT_INTERVAL / 3) -> None:
        self._beat, self._seconds = beat, seconds
        self._ended = threading.Event()
        threading.Thread(target=self._live, name="heartbeat", daemon=True).start()

    def end(self) -> None:
        """No more of them."""
        self._ended.set()

    def _live(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                self._beat()
            except Exception:  # the loop that pulls messages meets the same trouble and deals with it
                continue
