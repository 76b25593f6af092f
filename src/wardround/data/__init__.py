"""What a federation is made of: readers, splits, partitioners, transforms, phantoms."""

from wardround.data.federation import ClientData, Federation, Samples, SplitName

__all__ = ["ClientData", "Federation", "Samples", "SplitName"]
