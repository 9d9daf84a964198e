"""Memory at an address, as an array."""

from __future__ import annotations

import ctypes

import numpy as np

from kvferry.geometry import Region


def memory(region: Region) -> np.ndarray:
    """Return the bytes of a region of host memory, uint8 of shape (length,). The array does not own them."""
    return np.frombuffer((ctypes.c_uint8 * region.length).from_address(region.address), np.uint8)
