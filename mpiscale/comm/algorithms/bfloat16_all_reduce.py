"""All-reduce of float32 whose messages are bfloat16: half the bytes, for gradients.

Each rank rounds its array, sends chunk s to rank s, adds up what it gets in float32,
rounds the sum, and all-gathers the rounded sums:

    rank r   float32 x -> bfloat16 -> chunk s to rank s
             sum of all ranks' chunk r in float32 -> bfloat16 -> to everybody

Terms are rounded once and sums once, never in between as around a ring of bfloat16
messages. With u = 2^-8 (8 significant bits), as long as nothing is subnormal,

    |error of an element| <= u (1 + u) sum_r |x_r| + u |sum_r x_r|,

besides float32's own rounding. All ranks get the same bits.

Traffic: 2 (p - 1) messages; 2 (p - 1) / p n elements of 2 bytes, exactly
`traffic.all_reduce_sent`.

Source: the direct exchange is the reduce-scatter for long vectors of R. Thakur, R.
Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
2005, section 4.4 (pairwise exchange).
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import BFLOAT16, FLOAT32, Array, array_module
from mpiscale.comm.algorithms.chunks import Chunks, even_counts
from mpiscale.comm.algorithms.kinds import AllReduce
from mpiscale.comm.algorithms.ring_all_gather import ring_all_gather
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator

WORD = np.uint16  # as which a bfloat16 travels


@AllReduce
def bfloat16_all_reduce(
    x: Array, total: Array, comm: Communicator, op: np.ufunc
) -> Steps:
    """Fill `total` with nearly the sum of the flat float32 array x over the ranks.

    Raises:
        TypeError: if x is of another type, or op is not np.add.
    """
    if x.dtype != FLOAT32 or op is not np.add:
        raise TypeError(
            f"bfloat16 messages carry sums of float32, got {op.__name__} of {x.dtype}: "
            "use another all-reduce"
        )
    p, rank = comm.size, comm.rank
    rounded = Chunks(x.astype(BFLOAT16).view(WORD), even_counts(x.size, p))
    mine = rounded[rank]
    arrived = array_module(x).empty((p - 1, mine.size), WORD)
    for step in range(1, p):  # as in the pairwise all-to-all
        source, dest = (rank - step) % p, (rank + step) % p
        inbox = arrived[step - 1]
        yield comm.Irecv(inbox, source), comm.Isend(rounded[dest], dest)
    terms = [x[:0]] * p  # in the order of the ranks: the same sum whoever adds
    terms[rank] = mine.view(BFLOAT16)
    for step in range(1, p):
        terms[(rank - step) % p] = arrived[step - 1].view(BFLOAT16)
    sums = terms[0].astype(FLOAT32)
    for term in terms[1:]:
        sums += term.astype(FLOAT32)
    mine[...] = sums.astype(BFLOAT16).view(WORD)
    yield from ring_all_gather.steps(rounded, comm)
    total[...] = rounded.flat.view(BFLOAT16).astype(FLOAT32)
