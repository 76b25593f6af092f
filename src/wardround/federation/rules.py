"""Who owns each entry of a model's state: the server and all clients, one client, or nobody because it is frozen.

Rules select by module object or module type, never by name: EfficientNet has 49 batch-norm layers and not one
parameter whose name contains "bn".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor, nn

from wardround.federation.messages import BadMessage

BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._BatchNorm,)


class Owner(StrEnum):
    """Who owns an entry."""

    SHARED = "shared"  # travels both ways and is averaged
    LOCAL = "local"  # persists at its client and never travels
    FROZEN = "frozen"  # pretrained: never trained, never travels


@dataclass(frozen=True)
class Rules:
    """An owner for every `state_dict` entry of one model, buffers included.

    Build with `Rules.of(model)`, which shares everything, and narrow it:

        Rules.of(model).frozen(model.frozen).local(model.head)
    """

    owners: Mapping[str, Owner]
    # A module that stands at several places of the model has its entries under each of those names.
    _places: Mapping[nn.Module, tuple[str, ...]]

    @classmethod
    def of(cls, model: nn.Module) -> Rules:
        """Share every entry of `model`."""
        places: dict[nn.Module, tuple[str, ...]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            places[module] = (*places.get(module, ()), f"{name}." if name else "")
        return cls(dict.fromkeys(model.state_dict(), Owner.SHARED), places)

    def shared(self, *modules: nn.Module) -> Rules:
        """These rules, with every entry inside `modules` shared."""
        return self._give(modules, Owner.SHARED)

    def local(self, *modules: nn.Module) -> Rules:
        """These rules, with every entry inside `modules` local to its client."""
        return self._give(modules, Owner.LOCAL)

    def frozen(self, *modules: nn.Module) -> Rules:
        """These rules, with every entry inside `modules` frozen."""
        return self._give(modules, Owner.FROZEN)

    def names(self, *owners: Owner) -> tuple[str, ...]:
        """The entries that belong to any of `owners`, in the model's order."""
        return tuple(name for name, owner in self.owners.items() if owner in owners)

    def pick(self, state: Mapping[str, Tensor], *owners: Owner) -> dict[str, Tensor]:
        """The entries of `state` that belong to any of `owners`."""
        return {name: state[name] for name in self.names(*owners)}

    def parameters(self, model: nn.Module, *owners: Owner) -> list[nn.Parameter]:
        """The parameters of `model` that belong to any of `owners`, in the model's order."""
        return list(self.named_parameters(model, *owners).values())

    def named_parameters(self, model: nn.Module, *owners: Owner) -> dict[str, nn.Parameter]:
        """The same by name."""
        chosen = set(self.names(*owners))
        return {name: parameter for name, parameter in model.named_parameters() if name in chosen}

    def refuse_private(self, names: Iterable[str]) -> None:
        """Raise `BadMessage` if any of `names` is not a shared entry: a leak must be an error, not a leak."""
        for name in names:
            owner = self.owners.get(name)
            if owner is not Owner.SHARED:
                raise BadMessage(f"state entry {name!r} is {owner or 'unknown'} and may not travel")

    def _give(self, modules: Iterable[nn.Module], owner: Owner) -> Rules:
        owners = dict(self.owners)
        for module in modules:
            if module not in self._places:
                raise ValueError(f"{type(module).__name__} is not part of the model that these rules are for")
            owners.update({name: owner for name in owners if name.startswith(self._places[module])})
        return Rules(owners, self._places)


def modules_of_type(model: nn.Module, types: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """Every module inside `model`, however deeply nested, that is an instance of `types`."""
    return [module for module in model.modules() if isinstance(module, types)]
