"""What of PFLlib `parity.py` compares: its methods in settings that both sides can have, and as shipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from parity_ours import RATES, Case, State, renamed, within
from wardround.methods.base import FedAvg
from wardround.methods.dbe import DBE
from wardround.methods.ditto import Ditto
from wardround.methods.fedbn import FedBN
from wardround.methods.fedlc import FedLC
from wardround.methods.fedper import FedPer
from wardround.methods.fedproto import FedProto
from wardround.methods.fedprox import FedProx
from wardround.methods.fedrep import FedRep
from wardround.methods.fedrod import FedRoD
from wardround.methods.moon import MOON
from wardround.methods.perfedavg import PerFedAvg
from wardround.methods.scaffold import SCAFFOLD

Kept = Callable[[Any, Sequence[str]], State]


# ---- what is read of them, and changed in them, case by case -------------------------------------------------------


def server_model(server: Any, names: Sequence[str]) -> State:
    """The server's model; where only the base is averaged it is the base alone."""
    return renamed(list(server.global_model.state_dict().values()), names)


def server_variates(server: Any, names: Sequence[str]) -> State:
    """The server's model and SCAFFOLD's c."""
    return server_model(server, names) | renamed(server.global_c, names, "memory")


def server_prototypes(server: Any, names: Sequence[str]) -> State:
    """FedProto's prototypes."""
    return {f"memory/prototype/{label}": mean.clone() for label, mean in server.global_protos.items()}


def nothing(client: Any, names: Sequence[str]) -> State:
    """A client that keeps nothing."""
    return {}


def whole_model(client: Any, names: Sequence[str]) -> State:
    """All of the client's model."""
    return renamed(list(client.model.state_dict().values()), names)


def own_head(client: Any, names: Sequence[str]) -> State:
    """The head of the client's model."""
    return renamed(list(client.model.head.state_dict().values()), within(names, "head."))


def personal_model(client: Any, names: Sequence[str]) -> State:
    """Ditto's second model."""
    return renamed(list(client.model_per.state_dict().values()), names, "memory")


def personal_vector(client: Any, names: Sequence[str]) -> State:
    """DBE's vector."""
    return {"state/neck.vector": client.client_mean.detach().clone()}


def personal_head(client: Any, names: Sequence[str]) -> State:
    """Fed-RoD's second head."""
    return {f"state/extras.personal_head.{name}": tensor.clone() for name, tensor in client.head.state_dict().items()}


def control_variate(client: Any, names: Sequence[str]) -> State:
    """SCAFFOLD's c_i."""
    return renamed(client.client_c, names, "memory")


def as_shipped(server: Any) -> None:
    """Change nothing."""


def zero_personal_heads(server: Any) -> None:
    """Fed-RoD's second heads start at zero."""
    for client in server.clients:
        for parameter in client.head.parameters():
            nn.init.zeros_(parameter)


def local_counts(server: Any) -> None:
    """FedLC's margins from the client's own label counts."""
    for client in server.clients:
        client.calibration = client.sample_per_class**-0.25


def collect_after_training(server: Any) -> None:
    """FedProto's prototypes by their own `collect_protos`, which they do not call."""

    def train_and_collect(client: Any, train: Callable[[], None]) -> None:
        train()
        client.collect_protos()

    for client in server.clients:
        client.train = lambda client=client, train=client.train: train_and_collect(client, train)


# ---- cases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PFLlibCase(Case):
    """A case with what their side needs.

    Attributes:
        module: their file, without `server` in front.
        server: their class in it.
        split: whether their network is split into base and head, as `main.py` does for this method.
        norm: what their batch norms are called.
        args: their options that differ from `DEFAULTS`.
        change: what is changed in their server and clients before the first round.
        common: what their server has.
        own: what their clients keep.
    """

    module: str
    server: str
    split: bool = False
    norm: str = "bn"
    args: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Any], None] = as_shipped
    common: Kept = server_model
    own: Kept = nothing


BUFFERS = (
    "PFLlib sends and averages only parameters(), never buffers (its issue #260): its server's running statistics are "
    "those of whichever client comes first. Ours averages them with the weights."
)
FEDBN_NAMES = (
    "PFLlib's FedBN looks for 'bn' in parameter names. Here its batch norms are called 'norm', so it shares their "
    "weights and is FedAvg. Ours goes by type."
)
FEDBN_WEIGHTS = "PFLlib weighs clients by their images; FedBN's authors, and ours by default, weigh all alike."
MU_0 = "PFLlib's default mu = 0 makes {}. By default ours has {}."
FEDREP_NORMS = (
    "PFLlib leaves the base in training mode while the head learns, so that its running statistics move and the head "
    "sees statistics of the batch. Ours keeps the fixed base in eval mode."
)
MOON_NORMS = (
    "PFLlib's reference networks are in training mode: they normalise by the batch, and their running statistics "
    "move. Ours are in eval mode."
)
MOON_T = "PFLlib's default temperature is 1; the authors' and ours is 0.5."
PROTOTYPES = (
    "PFLlib gathers prototypes while the network is still learning (its collect_protos() is there and not called). "
    "Ours computes them after training, in eval mode."
)
ROD_START = "PFLlib's personal heads start as copies of the generic one, ours at zero, so that z_G + z_P starts as z_G."
LC_COUNTS = (
    "PFLlib's margins come from the label counts of all clients together; the paper's and ours from the client's."
)
DBE_ZERO = (
    "PFLlib's running mean starts each round at 0 without correction, which shrinks it by 1 - (1 - m)^batches. Ours "
    "starts with the first batch."
)
KAPPA_0 = "PFLlib's default kl_weight = 0 makes DBE FedAvg with personal vectors. Ours is kappa = 50, as the authors'."
TWICE = "PFLlib trains twice a round (its issue #59), so it takes two passes over the images where ours takes one."

FEDAVG: dict[str, Any] = {"title": "FedAvg", "module": "avg", "server": "FedAvg"}
PROX: dict[str, Any] = {"title": "FedProx", "module": "prox", "server": "FedProx"}
DITTO: dict[str, Any] = {
    "title": "Ditto", "module": "ditto", "server": "Ditto", "parts": ("server", "clients"), "own": personal_model,
    "passes": ("personal", "batches"),
}  # fmt: skip
BN: dict[str, Any] = {
    "title": "FedBN", "module": "bn", "server": "FedBN", "network": "cnn-bn", "parts": ("server", "clients"),
    "own": whole_model,
}  # fmt: skip
REP: dict[str, Any] = {
    "title": "FedRep", "module": "rep", "server": "FedRep", "split": True, "parts": ("server", "clients"),
    "own": own_head, "passes": ("head", "batches"), "method": FedRep(),
}  # fmt: skip
CONTRAST: dict[str, Any] = {"title": "MOON", "module": "moon", "server": "MOON", "split": True}
PROTO: dict[str, Any] = {
    "title": "FedProto", "module": "proto", "server": "FedProto", "split": True, "parts": ("clients", "server"),
    "common": server_prototypes, "own": whole_model, "passes": ("batches", "collecting"), "method": FedProto(),
}  # fmt: skip
ROD: dict[str, Any] = {
    "title": "Fed-RoD", "module": "rod", "server": "FedROD", "split": True, "parts": ("server", "clients"),
    "own": personal_head, "setup": ("counting",), "method": FedRoD(),
}  # fmt: skip
LC: dict[str, Any] = {
    "title": "FedLC", "module": "lc", "server": "FedLC", "split": True, "setup": ("counting",), "method": FedLC(),
}  # fmt: skip
BIAS: dict[str, Any] = {
    "title": "DBE", "module": "dbe", "server": "FedDBE", "split": True, "parts": ("server", "clients"),
    "own": personal_vector, "setup": ("looking", "batches"), "args": {"kl_weight": 50.0},
}  # fmt: skip
META: dict[str, Any] = {
    "title": "Per-FedAvg", "module": "peravg", "server": "PerAvg", "method": PerFedAvg(alpha=RATES["cnn"]),
    "passes": ("batches", "batches"),
}  # fmt: skip

CASES = (
    PFLlibCase(**FEDAVG, settings="plain", method=FedAvg()),
    PFLlibCase(
        **FEDAVG, settings="with batch norms", method=FedAvg(), network="cnn-bn", parts=("server", "buffers"),
        because={"buffers": BUFFERS},
    ),
    PFLlibCase(**PROX, settings="mu = 0.1", method=FedProx(mu=0.1), args={"mu": 0.1}),
    PFLlibCase(
        **PROX, settings="as shipped", method=FedProx(), because={"server": MU_0.format("FedProx FedAvg", "mu = 0.01")}
    ),
    PFLlibCase(
        title="SCAFFOLD", settings="as shipped", method=SCAFFOLD(), module="scaffold", server="SCAFFOLD",
        parts=("server", "clients"), common=server_variates, own=control_variate,
    ),
    PFLlibCase(**DITTO, settings="lambda = 1", method=Ditto(**{"lambda": 1.0}), args={"mu": 1.0}),
    PFLlibCase(
        **DITTO, settings="as shipped", method=Ditto(),
        because={"clients": MU_0.format("Ditto's personal models isolated training", "lambda = 1")},
    ),
    PFLlibCase(
        title="FedPer", settings="as shipped", method=FedPer(), module="per", server="FedPer", split=True,
        parts=("server", "clients"), own=own_head,
    ),
    PFLlibCase(**REP, settings="as shipped"),
    PFLlibCase(
        **REP, settings="with batch norms", network="cnn-bn",
        because={"server": FEDREP_NORMS, "clients": FEDREP_NORMS},
    ),
    PFLlibCase(**BN, settings="weights = examples", method=FedBN(weights="examples")),
    PFLlibCase(
        **BN, settings="as shipped", method=FedBN(), because={"server": FEDBN_WEIGHTS, "clients": FEDBN_WEIGHTS}
    ),
    PFLlibCase(
        **BN, settings="other names", method=FedBN(weights="examples"), norm="norm",
        because={"server": FEDBN_NAMES, "clients": FEDBN_NAMES},
    ),
    PFLlibCase(
        **CONTRAST, settings="mu = 1, T = 1, no projection", method=MOON(projection=0, temperature=1.0),
        args={"mu": 1.0},
    ),
    PFLlibCase(
        **CONTRAST, settings="mu = 1, T as shipped", method=MOON(projection=0), args={"mu": 1.0},
        because={"server": MOON_T},
    ),
    PFLlibCase(
        **CONTRAST, settings="as shipped", method=MOON(projection=0),
        because={"server": MU_0.format("MOON FedAvg", "mu = 1, like the authors'")},
    ),
    PFLlibCase(
        **CONTRAST, settings="mu = 1, T = 1, with batch norms", method=MOON(projection=0, temperature=1.0),
        args={"mu": 1.0}, network="cnn-bn", because={"server": MOON_NORMS},
    ),
    PFLlibCase(**PROTO, settings="its collect_protos() called", change=collect_after_training),
    PFLlibCase(**PROTO, settings="as shipped", because={"server": PROTOTYPES, "clients": PROTOTYPES}),
    PFLlibCase(**ROD, settings="personal heads start at 0", change=zero_personal_heads),
    PFLlibCase(**ROD, settings="as shipped", because={"clients": ROD_START}),
    PFLlibCase(**LC, settings="margins of local counts", change=local_counts),
    PFLlibCase(**LC, settings="as shipped", because={"server": LC_COUNTS}),
    PFLlibCase(
        **BIAS, settings="kappa = 50, m = 0.1, start at 0", method=DBE(momentum=0.1, mean_start="zero")
    ),
    PFLlibCase(
        **BIAS, settings="kappa = 50, m = 0.1", method=DBE(momentum=0.1),
        because={"server": DBE_ZERO, "clients": DBE_ZERO},
    ),
    PFLlibCase(
        **BIAS | {"args": {}}, settings="as shipped", method=DBE(momentum=0.1),
        because={"server": KAPPA_0, "clients": KAPPA_0},
    ),
    PFLlibCase(**META, settings="two epochs of ours", epochs=2),
    PFLlibCase(**META, settings="as shipped", because={"server": TWICE}),
)  # fmt: skip
