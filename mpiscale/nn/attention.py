"""Causal self-attention with as many or fewer key/value heads as query heads."""

from __future__ import annotations

from mpiscale.errors import InputError
from mpiscale.nn.layers import Linear
from mpiscale.nn.module import Module
from mpiscale.nn.parameter import Initializer
from mpiscale.nn.placement import Placement
from mpiscale.ops.attention import attention
from mpiscale.ops.rope import rope, rope_table
from mpiscale.ops.shapes import reshape, split
from mpiscale.tensor import Tensor


class Attention(Module):
    """Multi-head (kv_heads = heads), grouped-query or multi-query (1) attention.

    x [b, t, width] -> y [b, t, width]. One product gives query, key and value of all
    heads; query head i reads key/value head i // (heads / kv_heads) (Ainslie et al.
    2023). With `rope_base`, queries and keys are turned by their position.
    `heads` and `kv_heads` count what this rank holds.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None,
        init: Initializer,
        out_init: Initializer,
        rope_base: float | None = None,
        bias: bool = True,
    ) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        check_heads_fit(width, heads, kv_heads)
        self.heads, self.kv_heads = heads, kv_heads
        self.head_size = width // heads
        if rope_base is not None and self.head_size % 2:
            raise InputError(
                f"RoPE turns pairs of features, but width {width} / {heads} heads = "
                f"{self.head_size} is odd: use another width or number of heads"
            )
        self.rope_base = rope_base
        kv_width = kv_heads * self.head_size
        self.qkv = Linear(width, (width, kv_width, kv_width), init, bias)
        self.out = Linear(width, (width,), out_init, bias)

    def forward(self, x: Tensor, placement: Placement) -> Tensor:
        """x [b, t, width] -> [b, t, width]"""
        q_width, kv_width = self.heads * self.head_size, self.kv_heads * self.head_size
        qkv = self.qkv(x)  # may bring tokens of other ranks
        b, t, _ = qkv.shape
        q, k, v = split(qkv, (q_width, kv_width, kv_width))
        q = reshape(q, (b, t, self.heads, self.head_size))
        k = reshape(k, (b, t, self.kv_heads, self.head_size))
        v = reshape(v, (b, t, self.kv_heads, self.head_size))
        if self.rope_base is not None:
            table = rope_table(
                placement.positions, self.head_size, self.rope_base, x.dtype
            )
            q, k = rope(q, *table), rope(k, *table)
        y = attention(q, k, v, causal=True)
        out: Tensor = self.out(reshape(y, (b, t, q_width)))
        return out


def check_heads_fit(width: int, heads: int, kv_heads: int) -> None:
    """Refuse head counts that do not divide what they cut, with the arithmetic."""
    for name, n, by in (("width", width, heads), ("heads", heads, kv_heads)):
        if by < 1 or n % by:
            unit = "heads" if name == "width" else "key/value heads"
            detail = f": {n} = {n // by} x {by} + {n % by}" if by > 0 else ""
            divisors = [d for d in range(1, n + 1) if n % d == 0]
            raise InputError(
                f"{name} {n} cannot be cut into {by} {unit}{detail}. Use one of "
                f"{divisors} {unit}, or another {name}"
            )
