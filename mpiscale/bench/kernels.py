"""Time every kernel beside its reference and PyTorch's op, and against the memory.

Most kernels do little arithmetic: the best they can do is to move their arrays at the
speed of the memory. That speed is measured first, as a copy's.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import numpy as np

from mpiscale.backend import Array
from mpiscale.bench.kernel_cases import (
    CASES,
    Arguments,
    KernelCase,
    bytes_moved,
    drawing,
)
from mpiscale.bench.machine import machine
from mpiscale.bench.shapes import Shape
from mpiscale.comm.threads import apply_threads
from mpiscale.kernels.bench import TOLERANCE, largest_error

REPEATS = 7
REFERENCE_REPEATS = 2
COPY_BYTES = 2**27  # many times any cache
Clock = Callable[[], float]


@dataclass(frozen=True)
class KernelTime:
    """One kernel at one size; times in seconds.

    Attributes:
        shapes: of its array arguments.
        bytes: read and written; see `bytes_moved`.
        bandwidth_share: of the copy's bytes per second; above 1 where the arrays fit
            into the caches.
        torch_s: None if PyTorch was not asked.
    """

    name: str
    shapes: list[tuple[int, ...]]
    bytes: int
    reference_s: float
    compiled_s: float
    torch_s: float | None
    bandwidth_share: float


def measure_kernels(
    shape: Shape, threads: int, against_torch: bool, cases: Sequence[KernelCase] = CASES
) -> dict[str, Any]:
    """Check and time all cases; everything that was measured, ready for JSON.

    One thread is timed by CPU time, which other processes do not lengthen; several are
    timed by wall time.

    Raises:
        RuntimeError: if a kernel differs from its reference.
    """
    here = machine()
    apply_threads(threads)
    clock = clock_for(threads)
    calls = _torch_calls(threads) if against_torch else {}
    bandwidth = copy_bandwidth(threads, clock)
    times = [measure(case, shape, clock, bandwidth, calls) for case in cases]
    return {
        "shape": asdict(shape),
        "threads": threads,
        "repeats": REPEATS,
        "clock": "CPU time" if threads == 1 else "wall time",
        "machine": here,
        "copy_bytes_per_second": bandwidth,
        "kernels": [asdict(time) for time in times],
    }


def clock_for(threads: int) -> Clock:
    """CPU time for one thread, wall time for several."""
    return time.process_time if threads == 1 else time.perf_counter


def _torch_calls(threads: int) -> dict[str, Callable[..., Callable[[], Any]]]:
    """PyTorch's ops, loaded only where they are asked for."""
    import_module("torch").set_num_threads(threads)
    calls: dict[str, Callable[..., Callable[[], Any]]] = import_module(
        "mpiscale.bench.torch_kernels"
    ).TORCH_CALLS
    return calls


def copy_bandwidth(threads: int, clock: Clock) -> float:
    """Bytes per second, read and written, of a copy of COPY_BYTES by `threads`."""
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    halves = (np.array_split(array, threads) for array in (target, source))
    parts = list(zip(*halves, strict=True))

    def copy_parts(pool: ThreadPoolExecutor) -> None:
        list(pool.map(lambda pair: np.copyto(*pair), parts))  # without the GIL

    with ThreadPoolExecutor(threads) as pool:
        copy_parts(pool)  # the first one touches the target's pages
        seconds = [_seconds(lambda: copy_parts(pool), clock) for _ in range(REPEATS)]
    return 2 * COPY_BYTES / min(seconds)


def measure(
    case: KernelCase,
    shape: Shape,
    clock: Clock,
    bandwidth: float,
    torch_calls: dict[str, Callable[..., Callable[[], Any]]],
) -> KernelTime:
    """Check one kernel, then time it and PyTorch's op in turn, then its reference."""
    arguments = case.arguments(drawing(), shape)
    moved = bytes_moved(case, arguments, _check(case, arguments))
    calls = [lambda: case.compiled(*arguments)]
    if torch_calls:
        calls.append(torch_calls[case.name](*arguments))
    compiled, *torch = medians(calls, REPEATS, clock)
    reference = medians(
        [lambda: case.reference(*arguments)], REFERENCE_REPEATS, clock, warm_up=False
    )
    return KernelTime(
        name=case.name,
        shapes=[a.shape for a in arguments if isinstance(a, np.ndarray)],
        bytes=moved,
        reference_s=reference[0],
        compiled_s=compiled,
        torch_s=torch[0] if torch else None,
        bandwidth_share=moved / compiled / bandwidth,
    )


def _check(case: KernelCase, arguments: Arguments) -> Any:
    """The kernel's result, once it is known to equal the reference's."""
    results = []
    for function in (case.reference, case.compiled):
        copies = tuple(a.copy() if isinstance(a, np.ndarray) else a for a in arguments)
        result = function(*copies)
        results.append((result, tuple(copies[i] for i in case.updated)))
    expected, got = ((*_arrays(result), *updated) for result, updated in results)
    error = largest_error(expected, got)
    if not error <= TOLERANCE["float32"]:  # NaN is an error too
        raise RuntimeError(f"{case.name} differs from its reference by {error:.1e}")
    return results[1][0]


def _arrays(result: Any) -> tuple[Array, ...]:
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


def medians(
    calls: Sequence[Callable[[], Any]],
    repeats: int,
    clock: Clock,
    warm_up: bool = True,
) -> list[float]:
    """The median time of each call, in s; they are made in turn."""
    if warm_up:
        for call in calls:
            call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, seconds in zip(calls, times, strict=True):
            seconds.append(_seconds(call, clock))
    return [statistics.median(seconds) for seconds in times]


def _seconds(call: Callable[[], Any], clock: Clock) -> float:
    start = clock()
    call()
    return clock() - start


def main(text: str) -> None:
    """Measure what a line of JSON asks for; print a line of JSON."""
    asked = json.loads(text)
    shape = Shape(**asked["shape"])
    print(json.dumps(measure_kernels(shape, asked["threads"], asked["torch"])))


if __name__ == "__main__":
    import sys

    main(sys.argv[1])
