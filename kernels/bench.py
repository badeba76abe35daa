"""Check a kernel against its reference, then time both: one table.

python -m mpiscale.kernels.softmax --rows 4096 --width 768 --dtype float32
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpiscale.backend import Array

TOLERANCE = {"float32": 1e-4, "float64": 1e-11}  # of the largest element
REPEATS = 7


class Case(NamedTuple):
    """A kernel's two versions, and its arguments made from normal x [rows, width]."""

    reference: Callable[..., Any]
    compiled: Callable[..., Any]
    arguments: Callable[[Array], tuple[Any, ...]]


def main(*cases: Case) -> None:
    """Print a line a kernel: both times in ms, their ratio, and the largest error."""
    options = _options()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((options.rows, options.width)).astype(options.dtype)
    print(f"{options.rows} x {options.width} {options.dtype}, median of {REPEATS}")
    head = "reference ms", "compiled ms", "ratio", "error"
    print(f"{'kernel':<28}{head[0]:>14}{head[1]:>13}{head[2]:>8}{head[3]:>10}")
    for case in cases:
        args = case.arguments(x)
        error = largest_error(case.reference(*args), case.compiled(*args))
        name = case.reference.__name__.removesuffix("_reference")
        if not error <= TOLERANCE[options.dtype]:  # NaN is an error too
            raise SystemExit(f"{name} differs from its reference by {error:.1e}")
        slow, fast = (median_ms(f, args) for f in (case.reference, case.compiled))
        print(f"{name:<28}{slow:>14.3f}{fast:>13.3f}{slow / fast:>8.1f}{error:>10.1e}")


def largest_error(expected: Any, got: Any) -> float:
    """The largest difference of two results, relative to the largest element."""
    if isinstance(expected, tuple):
        return max(map(largest_error, expected, got))
    if expected is None or expected.size == 0:
        return 0.0
    scale = max(np.abs(expected).max(), 1e-30)
    return float(np.abs(got - expected).max() / scale)


def median_ms(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """The median time of a call, in milliseconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function(*args)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="float32")
    return parser.parse_args()
