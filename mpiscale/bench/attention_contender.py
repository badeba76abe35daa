"""One kind of attention, run when it is asked: the other end of `attention.py`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Literal

import numpy as np

from mpiscale.backend import Array, keep_freed_memory
from mpiscale.bench.attention import AttentionShape
from mpiscale.comm.threads import apply_threads
from mpiscale.ops.attention import attention, plain_attention
from mpiscale.tensor import Tensor
from mpiscale.train.memory import peak_resident_bytes

Kind = Literal["flash", "plain"]
FUNCTIONS: dict[Kind, Callable[..., Tensor]] = {
    "flash": attention,
    "plain": plain_attention,
}


def serve(kind: Kind, threads: int, **shape: int) -> None:
    """Answer each line of stdin with one pass's time and the peak so far."""
    apply_threads(threads)
    keep_freed_memory()
    made = AttentionShape(**shape)
    size = (made.batch, made.length, made.heads, made.head_size)
    rng = np.random.default_rng(0)
    q, k, v, dy = rng.normal(size=(4, *size)).astype(np.float32)
    _one_pass(kind, *(x[:, :8].copy() for x in (q, k, v, dy)))  # compiles
    before = peak_resident_bytes()
    clock = time.process_time if threads == 1 else time.perf_counter
    for _ in sys.stdin:
        started = clock()
        _one_pass(kind, q, k, v, dy)
        reply = {"seconds": clock() - started, "peak": peak_resident_bytes() - before}
        print(json.dumps(reply), flush=True)


def _one_pass(kind: Kind, q: Array, k: Array, v: Array, dy: Array) -> None:
    inputs = [Tensor(x, requires_grad=True) for x in (q, k, v)]
    FUNCTIONS[kind](*inputs).backward(dy)


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
