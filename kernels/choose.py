"""Which version of a kernel runs: the only file that asks where an array lives.

Also the only file of the kernels that reads the environment:

MPISCALE_KERNELS   numba (default): compiled; reference: the NumPy specification
NUMBA_CACHE_DIR, XDG_CACHE_HOME   where compiled kernels are kept, see `cache.py`
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, cast

import numpy as np

from mpiscale.backend import (
    FLOAT32,
    FLOAT_DTYPES,
    DType,
    array_module,
    is_half,
)

P = ParamSpec("P")
R = TypeVar("R")
Implementation = Literal["numba", "reference"]


def implementation() -> Implementation:
    """The version that MPISCALE_KERNELS asks for.

    Raises:
        ValueError: if it asks for one that does not exist.
    """
    name = os.environ.get("MPISCALE_KERNELS", "numba")
    if name == "numba":
        return "numba"
    if name == "reference":
        return "reference"
    raise ValueError(
        f"MPISCALE_KERNELS is {name!r}, expected 'numba' or 'reference': "
        "unset it to run the compiled kernels"
    )


def cache_base() -> Path:
    """Folder that the user has for caches: Numba's own, else the desktop's."""
    for variable in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        if folder := os.environ.get(variable):
            return Path(folder)
    return Path(os.path.expanduser("~")) / ".cache"


def choose(
    reference: Callable[P, R],
    compiled: Callable[P, R],
    *,
    like: tuple[str | None, ...] = (),
    writes: tuple[str, ...] = (),
    statistics: tuple[str, ...] = (),
) -> Callable[P, R]:
    """The public kernel: one of two equal functions, for arrays of any float type.

    16-bit floats are computed in float32: arguments are widened, each output is
    narrowed to the type of the argument that `like` names for it (None: stays wide,
    for sums and statistics), and arguments named in `writes` are written back.
    Arguments named in `statistics` may be of another float type than the rest.

    The kernel raises:
        TypeError: if an array is not NumPy's, or the arrays mix float32 and float64.
    """
    run = compiled if implementation() == "numba" else reference
    names = tuple(inspect.signature(reference).parameters)

    @functools.wraps(reference)
    def kernel(*args: P.args, **kwargs: P.kwargs) -> R:
        given: dict[str, Any] = dict(zip(names, args, strict=False), **kwargs)
        array_module(given.get(names[0]))  # type: ignore[arg-type]  # it checks that
        dtypes = _float_dtypes(given, statistics)
        if any(is_half(dtype) for dtype in dtypes):
            wide = {name: _widen(value) for name, value in given.items()}
            result = cast(Callable[..., Any], run)(**wide)
            for name in writes:
                given[name][...] = wide[name]
            return cast(R, _narrow(result, like, given))
        if len(dtypes) != 1:
            raise TypeError(
                f"{reference.__name__} got {_listing(dtypes)}, expected arrays of one "
                "of float32 and float64: convert them with .astype"
            )
        return run(*args, **kwargs)

    return kernel


def expect_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """Compiled code does not check bounds, so its callers check shapes.

    Raises:
        ValueError: if `array` does not have this shape.
    """
    if array.shape != shape:
        raise ValueError(
            f"{name} has shape {array.shape}, expected {shape}: reshape or cut it"
        )


def _float_dtypes(given: dict[str, Any], free: tuple[str, ...]) -> set[DType]:
    arrays = (
        value
        for name, value in given.items()
        if isinstance(value, np.ndarray) and name not in free
    )
    return {array.dtype for array in arrays}.intersection(FLOAT_DTYPES)


def _listing(dtypes: set[DType]) -> str:
    return " and ".join(sorted(map(str, dtypes))) or "no array of floats"


def _widen(value: Any) -> Any:
    half = isinstance(value, np.ndarray) and is_half(value.dtype)
    return value.astype(FLOAT32) if half else value


def _narrow(result: Any, like: tuple[str | None, ...], given: dict[str, Any]) -> Any:
    if isinstance(result, tuple):
        pairs = zip(result, like, strict=True)
        return tuple(_narrow(output, (name,), given) for output, name in pairs)
    if not like or like[0] is None:
        return result
    return result.astype(given[like[0]].dtype, copy=False)
