"""Arrays of any kind: the only file that asks which library one belongs to."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any, TypeAlias, TypeGuard

import ml_dtypes
import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
DType: TypeAlias = np.dtype[Any]

FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
FLOAT_DTYPES = (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)


def array_module(x: Array) -> ModuleType:
    """The library whose functions work on `x`: NumPy, or CuPy for arrays on a GPU.

    CuPy is not imported here: before somebody has, there is no array of it.
    """
    if isinstance(x, (np.ndarray, np.generic)):
        return np
    if is_on_device(x):
        return sys.modules[type(x).__module__]
    raise TypeError(
        f"expected a NumPy or CuPy array, got {type(x).__module__}."
        f"{type(x).__name__}: convert it with numpy.asarray or cupy.asarray"
    )


def is_on_device(x: object) -> bool:
    """Whether `x` is an array in the memory of a GPU: CuPy's.

    Arrays of PyTorch and Numba have that interface too, but not NumPy's functions.
    """
    kind = type(x)
    if kind is np.ndarray or not hasattr(kind, "__cuda_array_interface__"):
        return False  # asked for every message: NumPy's answer comes first
    library = sys.modules.get(kind.__module__)
    return isinstance(x, getattr(library, "ndarray", ()))


def is_array(x: object) -> TypeGuard[Array]:
    """Whether `x` is an array, on the host or on a device."""
    return isinstance(x, np.ndarray) or is_on_device(x)


def is_writeable(x: Array) -> bool:
    """Whether elements of `x` may be changed; CuPy's flags don't say it."""
    if isinstance(x, np.ndarray):
        return x.flags.writeable
    return not x.__cuda_array_interface__["data"][1]


def to_host(x: Array) -> Array:
    """The values of `x` in new memory of the host, when they are computed."""
    if isinstance(x, np.ndarray):
        return x.copy()
    host: Array = array_module(x).asnumpy(x)
    return host


def to_device(x: Array, like: Array) -> Array:
    """The values of the host's array `x` where `like` is: on its device, or here."""
    return x if isinstance(like, np.ndarray) else array_module(like).asarray(x)


def is_half(dtype: DType) -> bool:
    """Whether `dtype` is a 16-bit float: stored as such, computed in float32."""
    return dtype in (FLOAT16, BFLOAT16)


def is_float(dtype: DType) -> bool:
    """Whether `dtype` is one of the floating-point types that a tensor may have."""
    return dtype in FLOAT_DTYPES


def accumulation_dtype(dtype: DType) -> DType:
    """The type in which sums of `dtype` are kept: float32, or float64 for float64."""
    if not is_float(dtype):
        raise TypeError(f"expected a floating-point type, got {dtype}")
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


def keep_freed_memory() -> bool:
    """Have this process keep the memory of freed arrays for the next ones.

    A training step allocates and frees the same sizes over and over. By default the C
    library gives large blocks back to the system, which then clears every page anew:
    2.4 us for each 4 KiB, 5 to 8 % of a step. Returns False where the C library has no
    such switch (it is glibc's `mallopt`).
    """
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # of glibc's malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = ((m_mmap_max, 0), (m_trim_threshold, 2**31 - 1), (m_top_pad, 2**26))
    return all(mallopt(name, value) == 1 for name, value in settings)
