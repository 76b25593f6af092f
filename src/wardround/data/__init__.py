"""What a federation is made of: readers, splits, partitioners, transforms, phantoms."""

from wardround.data.federation import ClientData, Federation, Samples

__all__ = ["ClientData", "Federation", "Samples"]
