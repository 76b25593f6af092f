"""CCVR as a method of its own, and on top of any other: `[method] name = "fedprox+ccvr"`."""

from __future__ import annotations

import functools
import inspect
from typing import Any, ClassVar, cast

from wardround.methods.base import FedAvg, Method
from wardround.methods.calibration import Calibration


class CCVR(Calibration, FedAvg):
    """Luo et al., NeurIPS 2021: federated averaging with a shared head, which is calibrated after the last round.

    What the calibration is, is said in `wardround.methods.calibration`. It needs `model.head = "shared"`.
    """

    name: ClassVar[str] = "ccvr"
    title: ClassVar[str] = "CCVR: the head calibrated on virtual features; also on top of others, as fedprox+ccvr"
    citation: ClassVar[str] = (
        "Luo, Chen, Hu, Zhang, Liang, Feng. No Fear of Heterogeneity: Classifier Calibration for Federated Learning "
        "with Non-IID Data. NeurIPS 2021."
    )
    skews: ClassVar[tuple[str, ...]] = ("label",)
    travels: ClassVar[str] = f"{FedAvg.travels}; once, mean and covariance of the features of every class"
    extra_cost: ClassVar[str] = (
        "once, a forward pass over the training images, and training a linear layer at the server"
    )


@functools.cache
def ccvr_on(kind: type[Method]) -> type[Method]:
    """The method `kind` with CCVR on top, whose name is `NAME+ccvr`; one that has it already is returned as it is."""
    if issubclass(kind, Calibration):
        return kind
    about: dict[str, Any] = {
        "__doc__": f"{inspect.getdoc(kind)}\n\nOn top: {inspect.getdoc(Calibration)}",
        # A class that is made when asked for cannot be found by its name in another process, its parts can.
        "__reduce__": lambda self: (_remade, (kind, self.model_dump())),
        "name": f"{kind.name}+ccvr",
        "title": f"{kind.title}, with CCVR",
        "citation": f"{kind.citation} {CCVR.citation}",
        "skews": tuple(dict.fromkeys((*kind.skews, *CCVR.skews))),
        "travels": f"{kind.travels}; once, mean and covariance of the features of every class",
        "extra_cost": f"{kind.extra_cost}; {CCVR.extra_cost}",
    }
    return cast(type[Method], type(f"{kind.__name__}CCVR", (Calibration, kind), about))


def _remade(kind: type[Method], keys: dict[str, Any]) -> Method:
    return ccvr_on(kind)(**keys)
