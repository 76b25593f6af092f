"""What is common to modules that want to know whose labels they see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class KnowsLabelCounts(ABC):
    """A part of a model that depends on a client's training images per class.

    Whoever lends the model to a client tells every such part. Counts belong to the client's data and are no state.
    """

    @abstractmethod
    def set_counts(self, counts: Sequence[int] | Tensor) -> None:
        """Take the counts, shape `(classes,)`."""
