"""GPT-2 (Radford et al. 2019), written serially; the strategies cut it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpiscale.backend import Array
from mpiscale.nn.attention import Attention
from mpiscale.nn.language_model import Cut, LanguageModel, VocabularyHead
from mpiscale.nn.layers import Dropout, Embedding, LayerNorm, transformer_init
from mpiscale.nn.mlp import GeluMLP
from mpiscale.nn.module import Module
from mpiscale.nn.placement import Placement
from mpiscale.ops.indexing import check_ids
from mpiscale.tensor import Tensor


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT."""

    vocabulary: int = 256
    length: int = 128  # longest sequence, in tokens
    layers: int = 4
    width: int = 128
    heads: int = 8
    kv_heads: int | None = None  # None: as many as heads
    dropout: float = 0.0
    tied: bool = True  # the head's table is the embedding's
    label_smoothing: float = 0.0


class Block(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).  [b, t, width] both ways"""

    def __init__(self, config: GPTConfig, index: int) -> None:
        init = transformer_init(config.width)
        out_init = transformer_init(config.width, branches=2 * config.layers)
        self.norm1 = LayerNorm(config.width)
        self.attention = Attention(
            config.width, config.heads, config.kv_heads, init, out_init
        )
        self.norm2 = LayerNorm(config.width)
        self.mlp = GeluMLP(config.width, 4 * config.width, init, out_init)
        self.dropout1 = Dropout(config.dropout, f"blocks.{index}.attention")
        self.dropout2 = Dropout(config.dropout, f"blocks.{index}.mlp")

    def forward(self, x: Tensor, placement: Placement) -> Tensor:
        """x [b, t, width] -> [b, t, width]"""
        y = self.attention(self.norm1(x), placement)
        x = x + self.dropout1(y, placement)
        return x + self.dropout2(self.mlp(self.norm2(x)), placement)


class GPT(LanguageModel):
    """Byte or token ids [b, t] -> logits [b, t, V]."""

    TENSOR_PARALLEL: ClassVar[dict[str, Cut]] = {
        "token_embedding": "vocabulary",
        "blocks.*.attention": "heads",
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row",
        "head": "vocabulary",
        "loss_function": "vocabulary",
        "sampler": "vocabulary",
    }

    BEFORE_BLOCKS: ClassVar[tuple[str, ...]] = ("token_embedding", "position_embedding")

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.vocabulary, config.length, config.label_smoothing)
        self.config = config
        init = transformer_init(config.width)
        self.token_embedding = Embedding(config.vocabulary, config.width, init)
        self.position_embedding = Embedding(config.length, config.width, init)
        self.dropout = Dropout(config.dropout, "embedding")
        self.blocks: list[Module] = [Block(config, i) for i in range(config.layers)]
        self.final_norm = LayerNorm(config.width)
        self.head = VocabularyHead(
            config.vocabulary,
            config.width,
            tied_to=self.token_embedding if config.tied else None,
        )

    def embed(self, tokens: Array, placement: Placement) -> Tensor:
        """tokens [b, t] -> input of the first block [b, t, width]"""
        positions = placement.resident_positions
        check_ids(positions, self.length, "position")
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        dropped: Tensor = self.dropout(x, placement)
        return dropped
