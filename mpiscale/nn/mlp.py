"""The feed-forward half of a block: GELU as in GPT-2, SwiGLU as in Llama."""

from __future__ import annotations

from mpiscale.nn.layers import Linear
from mpiscale.nn.module import Module
from mpiscale.nn.parameter import Initializer
from mpiscale.ops.activations import gelu_tanh, swiglu
from mpiscale.tensor import Tensor


class GeluMLP(Module):
    """y = gelu(x U + a) D + c.  x [..., width] -> y [..., width]"""

    def __init__(
        self,
        width: int,
        hidden: int,
        init: Initializer,
        out_init: Initializer,
        bias: bool = True,
    ) -> None:
        self.up = Linear(width, (hidden,), init, bias)
        self.down = Linear(hidden, (width,), out_init, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., width]"""
        y: Tensor = self.down(gelu_tanh(self.up(x)))
        return y


class SwigluMLP(Module):
    """y = (silu(x G) * (x U)) D (Shazeer 2020); G and U stand side by side in `up`."""

    def __init__(
        self, width: int, hidden: int, init: Initializer, out_init: Initializer
    ) -> None:
        self.up = Linear(width, (hidden, hidden), init, bias=False)
        self.down = Linear(hidden, (width,), out_init, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., width]"""
        y: Tensor = self.down(swiglu(self.up(x)))
        return y
