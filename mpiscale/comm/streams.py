"""CUDA streams, as far as arrays in flight need them; nothing happens for NumPy.

Work on a GPU is queued on CuPy's current stream and runs later, in the order of that
stream. Two things may go wrong, one when somebody looks too early, the other when
memory is used again too early:

- MPI, and the host, know nothing of streams: `settled` waits for the queued work.
- CuPy hands freed memory to the next who asks on the *same* stream, at once, though a
  copy on another stream may still read it: `freed_after` makes the first stream wait.
"""

from __future__ import annotations

from typing import Any

from mpiscale.backend import Array, array_module, is_on_device


def current_stream(x: Array) -> Any:
    """The stream on which work on `x` is queued now; None for NumPy."""
    return array_module(x).cuda.get_current_stream() if is_on_device(x) else None


def settled(x: Array) -> Array:
    """`x`, when all that is queued on the current stream is done."""
    stream = current_stream(x)
    if stream is not None:
        stream.synchronize()
    return x


def freed_after(x: Array, allocated: Any) -> None:
    """Let `x` be freed, which was allocated on one stream and last used on this one."""
    stream = current_stream(x)
    if stream is not None and stream.ptr != allocated.ptr:
        allocated.wait_event(stream.record())
