"""FedHealth: the global model's backbone is frozen and its head fitted to the client."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from wardround.methods.finetune import FineTuning


class FedHealth(FineTuning):
    """Transfer in the manner of Chen et al., IEEE Intelligent Systems 2020.

    The client keeps the feature extractor of the global model as received and trains the upper layers, here the head,
    on its own images. The authors' CORAL layer aligns features with those of data at the server; there are none here,
    so it is left out, and so is their encryption, which does not change what is learned.
    """

    name: ClassVar[str] = "fedhealth"
    title: ClassVar[str] = "FedHealth-style transfer: frozen backbone, adapted head"
    citation: ClassVar[str] = (
        "Chen, Qin, Wang, Yu, Gao. FedHealth: A Federated Transfer Learning Framework for Wearable Healthcare. "
        "IEEE Intelligent Systems 35(4), 2020."
    )

    start: Literal["trained", "received"] = Field(
        "received", description="adapt the model that local training left, or the one that the round began with"
    )
    what: Literal["all", "head"] = Field("head", description="fine-tune all that trains, or the head alone")
