"""Compile a kernel for rows [lo, hi) and share its rows out among threads.

A kernel body is written for one thread and a range of rows. One thread runs it as it
is; more run it each on its own range, below one parallel loop, which is compiled only
when it is first needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types

from mpiscale.kernels.cache import SharedCache

F = TypeVar("F", bound=Callable[..., Any])

# Sums may be reordered and products fused, so that loops vectorise; infinities and
# NaN keep their meaning, since masks are -inf and a diverged loss must show.
FASTMATH = {"reassoc", "contract", "nsz"}
ELEMENTS_PER_THREAD = 16384  # fewer cost less than waking a thread (about 30 us)


def compiled(function: F) -> F:
    """`function` compiled on first use for the types it is called with."""
    dispatcher = _njit(function)
    dispatcher._cache = SharedCache(function)
    return dispatcher


class RowKernel:
    """kernel(rows, *args) runs body(lo, hi, *args) for ranges that cover the rows.

    What a row's result is must not depend on the range in which it is computed: then
    the result does not depend on the number of threads.
    """

    def __init__(
        self, body: Callable[..., None], signature: tuple[Any, ...] | None = None
    ) -> None:
        """With `signature`, the Numba types of args, the body is compiled for it alone.

        Arguments are then converted to it: an array of any strides takes all layouts,
        which would else be compiled one by one.
        """
        self.body = body
        self._signature = signature

    def __call__(self, rows: int, *args: Any) -> None:
        """Run the kernel on all rows, on as many threads as Numba was granted."""
        if rows:
            self.run(rows, _threads_for(rows, args), *args)

    def run(self, rows: int, threads: int, *args: Any) -> None:
        """Run the kernel on all rows, on so many threads."""
        if threads > 1:
            self._parallel(rows, threads, args)
        else:
            self.serial(0, rows, *args)

    @functools.cached_property
    def serial(self) -> Any:
        """The body, compiled for one thread: serial(lo, hi, *args)."""
        dispatcher = compiled(self.body)
        if self._signature:
            _fix_types(dispatcher, types.intp, types.intp, *self._signature)
        return dispatcher

    @functools.cached_property
    def _parallel(self) -> Callable[[int, int, tuple[Any, ...]], None]:
        serial = self.serial

        def driver(rows: int, threads: int, args: tuple[Any, ...]) -> None:
            for t in numba.prange(threads):
                serial(rows * t // threads, rows * (t + 1) // threads, *args)

        dispatcher = _njit(driver, parallel=True)
        body = self.body
        dispatcher._cache = SharedCache(driver, f"{body.__module__}.{body.__name__}")
        if self._signature:
            _fix_types(dispatcher, types.intp, types.intp, types.Tuple(self._signature))
        return dispatcher


row_kernel = RowKernel  # reads better as a decorator


def _njit(function: Callable[..., Any], parallel: bool = False) -> Any:
    return numba.njit(
        nogil=True, error_model="numpy", fastmath=FASTMATH, parallel=parallel
    )(function)


def _fix_types(dispatcher: Any, *signature: Any) -> None:
    dispatcher.compile(signature)
    dispatcher.disable_compile()


def _threads_for(rows: int, args: tuple[Any, ...]) -> int:
    elements = max(a.size for a in args if isinstance(a, np.ndarray))
    wanted = min(rows, elements // ELEMENTS_PER_THREAD)
    # Asking Numba starts its threads, so a small problem does not ask.
    return min(wanted, numba.get_num_threads()) if wanted > 1 else 1
