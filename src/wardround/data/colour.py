"""Shades-of-grey colour constancy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def shades_of_grey(image: NDArray[np.uint8], power: float = 6.0) -> NDArray[np.uint8]:
    """Remove the colour cast of the light, as FLamby does to ISIC images (Finlayson and Trezzi, CIC 2004).

    The light e has one component a channel c, `e_c = mean(I_c^p)^(1/p)`, scaled to length 1; each channel is
    divided by `sqrt(3) e_c`, so a grey light changes nothing. FLamby lets values beyond 255 wrap around; they
    are clipped here.

    Args:
        image: uint8 `(H, W, 3)`.
        power: the Minkowski norm p; 1 is grey-world, infinity is max-RGB.
    """
    values = image.astype(np.float64)
    light = np.mean(values**power, axis=(0, 1)) ** (1 / power)
    length = float(np.linalg.norm(light))
    if length == 0 or np.any(light == 0):
        return image
    balanced = values * (length / (np.sqrt(3.0) * light))
    clipped: NDArray[np.uint8] = np.clip(balanced, 0, 255).astype(np.uint8)
    return clipped
