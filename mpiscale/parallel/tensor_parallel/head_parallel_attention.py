"""Attention cut by heads: each rank computes its own heads from start to end."""

from __future__ import annotations

from collections.abc import Callable

from mpiscale.comm.communicator import Communicator
from mpiscale.errors import InputError, block_length
from mpiscale.nn.attention import Attention
from mpiscale.parallel.sharding import AxisShard
from mpiscale.parallel.tensor_parallel.column_parallel_linear import (
    ColumnParallelLinear,
)
from mpiscale.parallel.tensor_parallel.row_parallel_linear import RowParallelLinear
from mpiscale.parallel.tied_parameters import Tie

ReplicaGroup = Callable[[int], Communicator]


def cut_heads(
    attention: Attention, comm: Communicator, replica_group: ReplicaGroup
) -> Attention:
    """Give this rank heads / p query heads and their key/value heads.

    With fewer key/value heads than ranks, p / kv_heads neighbouring ranks hold the same
    head; each sees the gradient of its own queries only, so theirs are summed.

    Args:
        attention: a whole, serial attention layer; it is changed and returned.
        comm: the ranks that share the layer.
        replica_group: n -> communicator of this rank's block of n neighbours.

    Raises:
        InputError: if the heads cannot be cut, with the arithmetic.
    """
    p, rank, size = comm.size, comm.rank, attention.head_size
    heads = block_length(attention.heads, p, "the attention heads")
    replicas, kv_heads = _kv_layout(attention.kv_heads, p)
    width = attention.heads * size
    kv_width = attention.kv_heads * size
    first_kv = rank // replicas * kv_heads * size
    ranges = [(rank * heads * size, (rank + 1) * heads * size)]
    for start in (width, width + kv_width):  # key, then value
        ranges.append((start + first_kv, start + first_kv + kv_heads * size))
    qkv = ColumnParallelLinear(attention.qkv, comm, AxisShard(1, tuple(ranges)))
    if replicas > 1:
        kv_columns = slice(heads * size, (heads + 2 * kv_heads) * size)
        group = replica_group(replicas)
        qkv.weight.ties.append(Tie(group, "sum", (slice(None), kv_columns)))
        if qkv.bias is not None:
            qkv.bias.ties.append(Tie(group, "sum", (kv_columns,)))
    attention.replace("qkv", qkv)
    attention.replace("out", RowParallelLinear(attention.out, comm))
    attention.heads, attention.kv_heads = heads, kv_heads
    return attention


def _kv_layout(kv_heads: int, p: int) -> tuple[int, int]:
    """(ranks that hold the same key/value heads, heads held by a rank)."""
    if kv_heads % p == 0:
        return 1, kv_heads // p
    if p % kv_heads == 0:
        return p // kv_heads, 1
    more, less = max(kv_heads, p), min(kv_heads, p)
    raise InputError(
        f"cannot spread {kv_heads} key/value heads over {p} ranks: "
        f"{more} = {more // less} x {less} + {more % less}. Use a multiple of the "
        "ranks (each holds several heads) or a divisor (several hold the same head)"
    )
