"""What the race is against: federated averaging as one writes it by hand in PyTorch, in one process.

One `DataLoader` a client over float images in memory, one thread, no checks, no messages, no records.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from wardround.data import Federation

State = dict[str, Tensor]
Batches = DataLoader[tuple[Tensor, ...]]


class LeanLoop:
    """One model that every client trains in turn; the average is built up while the round goes on.

    Args:
        model: float images `(B, C, H, W)` to logits; its weights are the start.
        federation: training images; they are scaled to -1..1 once, before the clock starts.
        batch_size: images in a batch.
        lr: learning rate.
    """

    def __init__(self, model: nn.Module, federation: Federation, batch_size: int, lr: float) -> None:
        self.model, self.lr = model, lr
        self.state: State = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        data = [_dataset(client.train.images, client.train.labels) for client in federation.clients]
        self.loaders: list[Batches] = [DataLoader(client, batch_size=batch_size, shuffle=True) for client in data]
        self.sizes = [len(client) for client in data]

    def round(self) -> None:
        """One local epoch at every client, then the mean weighted by their images."""
        mean = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        for loader, size in zip(self.loaders, self.sizes, strict=True):
            self.model.load_state_dict(self.state)
            train(self.model, loader, self.lr)
            for name, tensor in self.model.state_dict().items():
                mean[name] += tensor * (size / sum(self.sizes))
        self.state = mean


class TextbookLoop(LeanLoop):
    """The more usual form: a copy of the model for every client, all of them kept until they are averaged."""

    def round(self) -> None:
        """One local epoch at every client, then the mean weighted by their images."""
        self.model.load_state_dict(self.state)
        states = []
        for loader in self.loaders:
            model = copy.deepcopy(self.model)
            train(model, loader, self.lr)
            states.append(model.state_dict())
        shares = [size / sum(self.sizes) for size in self.sizes]
        self.state = {
            name: sum(share * state[name] for share, state in zip(shares, states, strict=True)) for name in self.state
        }


def train(model: nn.Module, loader: Batches, lr: float) -> None:
    """One epoch of plain SGD on the cross-entropy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _dataset(images: np.ndarray, labels: np.ndarray) -> TensorDataset:
    planes = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    return TensorDataset((planes / 127.5 - 1).contiguous(), torch.from_numpy(labels))
