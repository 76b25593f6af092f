"""PFLlib's half of `parity.py`: its own servers, clients, network and round loop, from a checkout that the user names.

What is replaced: the loader, by one that has our batches; evaluation and saving, by nothing. `main.py` is not used. So
what their loader does wrong is not seen here: it drops a last batch that is not whole, hence all images of a client
that has fewer, and Fed-RoD counts labels through it, where a rare class can be missed and its log count is -inf.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import io
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from parity_ours import BATCH, SIDE, Ours, Replay, Standing, copy_in_order
from parity_pfllib_cases import CASES, PFLlibCase
from wardround.methods.trial import CLASSES

NEVER = 10**9
NEEDLESS = ("h5py", "matplotlib", "matplotlib.pyplot")  # imported for results and plots, which are not made here

# Their defaults, as `main.py` has them, but for what our federation decides.
DEFAULTS: dict[str, Any] = {
    "algorithm": "", "dataset": "parity", "device": "cpu", "goal": "parity", "save_folder_name": "",
    "num_classes": CLASSES, "global_rounds": NEVER, "local_epochs": 1, "plocal_epochs": 1, "eval_gap": NEVER,
    "batch_size": BATCH, "learning_rate_decay": False, "learning_rate_decay_gamma": 0.99,
    "server_learning_rate": 1.0, "join_ratio": 1.0, "random_join_ratio": False, "client_drop_rate": 0.0,
    "train_slow_rate": 0.0, "send_slow_rate": 0.0, "time_select": False, "time_threthold": NEVER, "few_shot": 0,
    "top_cnt": 100, "auto_break": False, "dlg_eval": False, "dlg_gap": 100, "batch_num_per_client": 2,
    "num_new_clients": 0, "fine_tuning_epoch_new": 0, "mu": 0.0, "lamda": 1.0, "tau": 1.0, "kl_weight": 0.0,
    "momentum": 0.1,
}  # fmt: skip


class PFLlib:
    """A checkout of PFLlib.

    Args:
        folder: the checkout; `system/flcore` is in it.

    Attributes:
        version: the checkout's commit, or that it is not known.
    """

    name = "PFLlib"
    cases: Sequence[PFLlibCase] = CASES

    def __init__(self, folder: Path) -> None:
        if not (folder / "system" / "flcore").is_dir():
            raise SystemExit(f"{folder}: not a checkout of PFLlib, there is no system/flcore in it")
        sys.path.insert(0, str(folder / "system"))
        for name in NEEDLESS:
            if importlib.util.find_spec(name.partition(".")[0]) is None:
                sys.modules[name] = ModuleType(name)
        self.version = _commit(folder)

    def run(self, case: PFLlibCase, ours: Ours, rounds: int) -> list[Standing]:
        """Where their side stands after each round of their own loop, with the batches of `ours`."""
        kind = getattr(importlib.import_module(f"flcore.servers.server{case.module}"), case.server)
        replays, names = ours.replays, list(ours.start)
        chosen = {"num_clients": len(replays), "local_learning_rate": case.lr, **case.args}
        args = SimpleNamespace(**DEFAULTS | chosen, model=self.network(case, ours.start))
        with _our_batches(replays), contextlib.redirect_stdout(io.StringIO()):
            _start(replays, 1, case.setup)
            server = kind(args, 0)
            case.change(server)
            _start(replays, 1)
            budget = _Rounds(rounds, replays, lambda: _standing(case, server, names))
            server.Budget = budget
            server.evaluate = server.evaluate_personalized = server.evaluate_one_step = lambda: None
            with contextlib.suppress(_Enough):
                server.train()
        return budget.standings

    def network(self, case: PFLlibCase, start: Mapping[str, Tensor]) -> nn.Module:
        """Their small CNN with our weights; with batch norms that are called `case.norm` where ours has some."""
        models = importlib.import_module("flcore.trainmodel.models")
        rows = ((SIDE - 4) // 2 - 4) // 2
        model: nn.Module = models.FedAvgCNN(in_features=3, num_classes=CLASSES, dim=64 * rows * rows)
        if case.network == "cnn-bn":
            model.conv1, model.conv2 = (_with_norm(block, case.norm) for block in (model.conv1, model.conv2))
        copy_in_order(model, start)
        if not case.split:
            return model
        head, model.fc = copy.deepcopy(model.fc), nn.Identity()
        split: nn.Module = models.BaseHeadSplit(model, head)
        return split


class _Enough(Exception):
    """Their loop has done what was asked for."""


class _Rounds(list[float]):
    """Stands in for the list to which their loop appends the seconds of each round, when it is over."""

    def __init__(self, rounds: int, replays: Sequence[Replay], standing: Callable[[], Standing]) -> None:
        super().__init__()
        self.rounds, self.replays, self.standing = rounds, replays, standing
        self.standings: list[Standing] = []

    def append(self, seconds: float) -> None:
        """Note where they stand, and begin the next round; `_Enough` after the last."""
        super().append(seconds)
        self.standings.append(self.standing())
        if len(self) == self.rounds:
            raise _Enough
        _start(self.replays, len(self) + 1)


class _Loader:
    """What their clients iterate over."""

    def __init__(self, replay: Replay, size: int) -> None:
        self.replay, self.size = replay, size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.replay.batches(self.size)

    def __len__(self) -> int:
        return self.replay.count(self.size)


@contextlib.contextmanager
def _our_batches(replays: Sequence[Replay]) -> Iterator[None]:
    """Let their clients load our batches, and their servers count our images."""
    clients = importlib.import_module("flcore.clients.clientbase")
    servers = importlib.import_module("flcore.servers.serverbase")
    theirs = clients.Client.load_train_data, servers.read_client_data

    def load(client: Any, batch_size: int | None = None) -> _Loader:
        return _Loader(replays[client.id], batch_size or client.batch_size)

    clients.Client.load_train_data = load
    servers.read_client_data = lambda dataset, number, **keywords: range(len(replays[number].client))
    try:
        yield
    finally:
        clients.Client.load_train_data, servers.read_client_data = theirs


def _start(replays: Sequence[Replay], round: int, passes: Sequence[str] | None = None) -> None:
    for replay in replays:
        replay.start(round, passes)


def _standing(case: PFLlibCase, server: Any, names: Sequence[str]) -> Standing:
    return Standing(case.common(server, names), [case.own(client, names) for client in server.clients])


def _with_norm(block: nn.Sequential, name: str) -> nn.Sequential:
    """A convolution, ReLU and pooling, with a batch norm after the convolution."""
    convolution, *rest = block
    parts = {"convolution": convolution, name: nn.BatchNorm2d(convolution.out_channels)}
    return nn.Sequential(OrderedDict(parts | {f"part{number}": part for number, part in enumerate(rest)}))


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown commit"
