"""What each side may choose for itself: `server.toml` and `client.toml`."""

from __future__ import annotations

import ipaddress
from typing import Any

from pydantic import Field

from wardround.options import Options

SERVER, CLIENT = "server.toml", "client.toml"
PORT = 9443
RUN = "run"


class ServerSettings(Options):
    """`server.toml`."""

    pretrained: str | None = Field(None, description="a file of the pretrained network's weights, if they are needed")
    host: str = Field(description="the name or address under which clients reach the server")
    listen: str = Field("0.0.0.0", description="the address on which it listens")
    port: int = Field(PORT, ge=1, le=65535, description="the port on which it listens")

    @property
    def address(self) -> str:
        """`host:port`, as clients use it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ClientSettings(Options):
    """`client.toml`: the hospital's own choices."""

    name: str = Field(description="the hospital's name in the federation")
    server: str = Field(description="host:port of the server")
    min_count: int = Field(ge=0, description="tell nothing that sums up fewer images; may be raised, not lowered")
    pretrained: str | None = Field(None, description="a file of the pretrained network's weights, if they are needed")
    data: dict[str, Any] = Field(default_factory=dict, description="keys of [data] that differ here: path and the like")
    labels: dict[str, str] = Field(default_factory=dict, description="this hospital's word = the federation's word")
    modalities: dict[str, str] = Field(default_factory=dict, description="the same for modalities")
    captions: dict[str, Any] = Field(
        default_factory=dict, description="keys of [captions] that differ here: where captions come from, and the like"
    )

    @property
    def host(self) -> str:
        """Of the server."""
        return self.server.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Whether an address is this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
