"""Forward and backward of a model, wherever its layers are.

`WholeModel` is for every strategy that leaves all layers on each rank, whole or cut;
`pipelined.py` for layers on different ranks. The training loop knows neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext

from mpiscale.backend import Array
from mpiscale.comm.trace import Slice
from mpiscale.comm.world import World
from mpiscale.data.batches import Batch
from mpiscale.nn.language_model import LanguageModel
from mpiscale.nn.placement import Noise, Placement
from mpiscale.parallel.data_parallel.interface import DataParallel
from mpiscale.tensor import Tensor
from mpiscale.train.config import TrainConfig
from mpiscale.train.memory import saved_bytes


class Passes(ABC):
    """What the training loop asks of a model.

    Attributes:
        activations: the most bytes kept for backward in the first step, if
            `--profile memory` asks for it.
    """

    activations: int | None = None

    @abstractmethod
    def forward_backward(self, batch: Batch, noise: Noise, dp: DataParallel) -> float:
        """Add the gradients of these samples; return their part of the loss."""

    @abstractmethod
    def loss(self, batch: Batch) -> float:
        """These samples' part of the loss."""

    @abstractmethod
    def next_token(self, window: Array, temperature: float, key: int) -> int:
        """A token that follows `window` [1, t]; see `Sampler`."""

    def predicted(self) -> list[Slice]:
        """What a trace shows beside the measured timeline; on rank 0."""
        return []

    def report(self) -> None:  # noqa: B027  (most have nothing to say)
        """Print what there is to say at the end of a run. Collective."""


MakePasses = Callable[[World, TrainConfig, LanguageModel], Passes]


class WholeModel(Passes):
    """All layers on this rank; the samples of a step in `accumulate` micro-batches."""

    def __init__(self, world: World, config: TrainConfig, model: LanguageModel) -> None:
        self.ledger, self.config, self.model = world.comm.ledger, config, model

    def forward_backward(self, batch: Batch, noise: Noise, dp: DataParallel) -> float:
        """One micro-batch after the other; the last one's gradients are sent."""
        total, count = 0.0, self.config.accumulate
        for i in range(count):
            micro = batch.part(i, count)
            with nullcontext() if i == count - 1 else dp.no_sync():
                with self.ledger.phase("forward"):
                    loss = self._loss(micro, noise)
                if self.config.profile == "memory" and self.activations is None:
                    self.activations = saved_bytes([loss], dp.arrays())
                with self.ledger.phase("backward"):
                    loss.backward()
            total += loss.item()
        return total

    def loss(self, batch: Batch) -> float:
        """The loss, a number."""
        return self._loss(batch, None).item()

    def _loss(self, batch: Batch, noise: Noise | None) -> Tensor:
        placement = placement_of(batch, self.config, noise)
        return self.model.loss(batch.tokens, batch.labels, placement, batch.valid)

    def next_token(self, window: Array, temperature: float, key: int) -> int:
        """Forward, then a sample from the last position's logits."""
        t = window.shape[1]
        batch = self.model.arrange(window, Placement.whole(1, t), None)
        hidden = self.model.hidden(batch.tokens, batch.placement)
        return sample(self.model, hidden, t - 1, temperature, key)


def sample(
    model: LanguageModel, hidden: Tensor, place: int, temperature: float, key: int
) -> int:
    """A token after `place`, from hidden states [1, t, width] (or this rank's own)."""
    logits = model.logits(hidden).data[0, place]
    token: int = model.sampler(logits, temperature, key)
    return token


def placement_of(batch: Batch, config: TrainConfig, noise: Noise | None) -> Placement:
    """Where a batch's tokens stand."""
    return Placement(batch.samples, batch.positions, config.length, noise)
