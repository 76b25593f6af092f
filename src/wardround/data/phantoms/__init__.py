"""Phantoms: medical-looking images made on the spot, whose classes and differences between sites are known."""

from wardround.data.phantoms.generate import phantom_federation
from wardround.data.phantoms.options import PhantomOptions
from wardround.data.phantoms.sheet import contact_sheet

__all__ = ["PhantomOptions", "contact_sheet", "phantom_federation"]
