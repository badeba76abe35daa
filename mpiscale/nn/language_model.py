"""What every language model here has: a vocabulary head, a loss, a table of cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from mpiscale import rng
from mpiscale.backend import Array
from mpiscale.nn.layers import Embedding, transformer_init
from mpiscale.nn.module import Module
from mpiscale.nn.parameter import Parameter
from mpiscale.nn.placement import Placement
from mpiscale.ops.cross_entropy import cross_entropy
from mpiscale.ops.matmul import vocabulary_logits
from mpiscale.tensor import Tensor

Cut = Literal["column", "row", "heads", "vocabulary"]


class VocabularyHead(Module):
    """Logits over the vocabulary from the embedding's own table (tied) or another."""

    def __init__(self, vocabulary: int, width: int, tied_to: Embedding | None) -> None:
        self.weight = (
            Parameter((vocabulary, width), transformer_init(width))
            if tied_to is None
            else tied_to.weight
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> logits [..., V]"""
        return vocabulary_logits(x, self.weight)


class CrossEntropyLoss(Module):
    """Sum over the valid labels divided by their number in the global batch.

    Labels are smoothed in training only: an evaluation tells the plain loss.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def forward(
        self,
        logits: Tensor,
        labels: Array,
        valid: int | None,
        overwrite: bool = False,
    ) -> Tensor:
        """logits [..., V], labels [...] -> scalar; see `ops.cross_entropy`"""
        smoothing = self.label_smoothing if self.training else 0.0
        return cross_entropy(logits, labels, valid, smoothing, overwrite)


class Sampler(Module):
    """Draws the next token from softmax(logits / temperature) by the Gumbel-max trick.

    argmax(logit / temperature + g), g = -ln(-ln u), is a sample of the softmax (Gumbel
    1954), and an argmax can be taken over parts of the vocabulary.
    """

    def forward(self, logits: Array, temperature: float, key: int) -> int:
        """logits [V], temperature (0: the most likely), random key -> id"""
        return int(np.argmax(gumbel_scores(logits, temperature, key, first=0)))


def gumbel_scores(logits: Array, temperature: float, key: int, first: int) -> Array:
    """logit / temperature + Gumbel noise, for vocabulary entries first, first + 1, ...

    An entry's noise is a function of (key, entry), whoever holds it.
    """
    if temperature < 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    scores = logits.astype(np.float64)
    if temperature == 0:
        return scores
    bits = rng.random_bits(key, first + np.arange(len(logits)))
    uniform = (bits + 0.5) / 2**32
    return scores / temperature - np.log(-np.log(uniform))


class Arranged(NamedTuple):
    """A batch as a model's layers take it; labels may be missing."""

    tokens: Array
    placement: Placement
    labels: Array | None


class LanguageModel(Module):
    """Tokens -> logits of the next token, and the loss against labels.

    `TENSOR_PARALLEL` says how each part is cut over ranks: path (with * for any index)
    -> kind of cut. Parts that it does not name are whole on every rank.
    A pipeline cuts between the blocks; `BEFORE_BLOCKS` and `AFTER_BLOCKS` name the
    other parts.

    `arrange(tokens, placement, labels)` gives the batch as the layers take it: as it
    is, unless a strategy that cuts sequences has put its own function there. `loss`
    begins with it; who calls the parts apart does so, too.
    """

    TENSOR_PARALLEL: ClassVar[dict[str, Cut]]
    BEFORE_BLOCKS: ClassVar[tuple[str, ...]] = ("token_embedding",)
    AFTER_BLOCKS: ClassVar[tuple[str, ...]] = ("final_norm", "head")
    token_embedding: Module  # an Embedding, or what a strategy puts in its place
    blocks: list[Module]
    final_norm: Module
    head: Module  # a VocabularyHead, or what a strategy puts in its place

    def __init__(self, vocabulary: int, length: int, label_smoothing: float) -> None:
        self.vocabulary, self.length = vocabulary, length
        self.loss_function = CrossEntropyLoss(label_smoothing)
        self.sampler = Sampler()
        self.arrange: Callable[[Array, Placement, Array | None], Arranged] = Arranged

    def embed(self, tokens: Array, placement: Placement) -> Tensor:
        """tokens [b, t] -> input of the first block [b, t, width]"""
        x: Tensor = self.token_embedding(tokens)
        return x

    def hidden(self, tokens: Array, placement: Placement) -> Tensor:
        """tokens [b, t] -> last hidden states [b, t, width]"""
        x = self.embed(tokens, placement)
        for block in self.blocks:
            x = block(x, placement)
        normed: Tensor = self.final_norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., V] (under tensor parallelism: this rank's columns)"""
        y: Tensor = self.head(hidden)
        return y

    def forward(self, tokens: Array, placement: Placement) -> Tensor:
        """tokens [b, t] -> logits [b, t, V]"""
        return self.logits(self.hidden(tokens, placement))

    def loss(
        self,
        tokens: Array,
        labels: Array,
        placement: Placement,
        valid: int | None = None,
    ) -> Tensor:
        """Cross entropy of the next token, in nats; see `CrossEntropyLoss`."""
        batch = self.arrange(tokens, placement, labels)
        assert batch.labels is not None
        hidden = self.hidden(batch.tokens, batch.placement)
        return self.loss_of(hidden, batch.labels, valid)

    def loss_of(self, hidden: Tensor, labels: Array, valid: int | None) -> Tensor:
        """The same from the last hidden states [b, t, width]."""
        logits = self.logits(hidden)  # seen by nobody else
        loss: Tensor = self.loss_function(logits, labels, valid, overwrite=True)
        return loss
