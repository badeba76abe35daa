"""Llama (Touvron et al. 2023): RMS norm, RoPE, SwiGLU, grouped heads, no biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpiscale.nn.attention import Attention
from mpiscale.nn.language_model import Cut, LanguageModel, VocabularyHead
from mpiscale.nn.layers import Embedding, RMSNorm, transformer_init
from mpiscale.nn.mlp import SwigluMLP
from mpiscale.nn.module import Module
from mpiscale.nn.placement import Placement
from mpiscale.tensor import Tensor


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama."""

    vocabulary: int = 256
    length: int = 128  # longest sequence, in tokens
    layers: int = 4
    width: int = 128
    heads: int = 8
    kv_heads: int | None = 2  # None: as many as heads
    hidden: int = 344  # about 8/3 width
    rope_base: float = 10000.0
    tied: bool = False  # the head's table is the embedding's
    label_smoothing: float = 0.0


class Block(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).  [b, t, width] both ways"""

    def __init__(self, config: LlamaConfig) -> None:
        init = transformer_init(config.width)
        out_init = transformer_init(config.width, branches=2 * config.layers)
        self.norm1 = RMSNorm(config.width)
        self.attention = Attention(
            config.width,
            config.heads,
            config.kv_heads,
            init,
            out_init,
            rope_base=config.rope_base,
            bias=False,
        )
        self.norm2 = RMSNorm(config.width)
        self.mlp = SwigluMLP(config.width, config.hidden, init, out_init)

    def forward(self, x: Tensor, placement: Placement) -> Tensor:
        """x [b, t, width] -> [b, t, width]"""
        x = x + self.attention(self.norm1(x), placement)
        return x + self.mlp(self.norm2(x))


class Llama(LanguageModel):
    """Token ids [b, t] -> logits [b, t, V]."""

    TENSOR_PARALLEL: ClassVar[dict[str, Cut]] = {
        "token_embedding": "vocabulary",
        "blocks.*.attention": "heads",
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row",
        "head": "vocabulary",
        "loss_function": "vocabulary",
        "sampler": "vocabulary",
    }

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.vocabulary, config.length, config.label_smoothing)
        self.config = config
        self.token_embedding = Embedding(
            config.vocabulary, config.width, transformer_init(config.width)
        )
        self.blocks: list[Module] = [Block(config) for _ in range(config.layers)]
        self.final_norm = RMSNorm(config.width)
        self.head = VocabularyHead(
            config.vocabulary,
            config.width,
            tied_to=self.token_embedding if config.tied else None,
        )
