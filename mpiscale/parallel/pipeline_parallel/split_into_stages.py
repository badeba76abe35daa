r"""Cuts a language model into the stages of a pipeline.

    embedding  block 0  block 1 | block 2  block 3 | block 4  norm, head, loss
    stage 0                     | stage 1          | stage 2

Stages are consecutive blocks: how many each has is a list, by which no block can get
lost. The embedding belongs to the first stage, final norm, head and loss to the last;
either may have no block at all. Parts on other ranks are taken out of the model, and
what is left keeps its names.

A weight that stages on several ranks use is on all of them: the embedding's table if
the head is tied to it; every weight of a stage that two ranks hold (`Bidirectional`).
Their gradients are terms of a sum, and so declared (`tied_parameters.py`). Where the
stages are on one rank (V shapes: first and last) it is one parameter, and nothing is to
be done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Protocol

from mpiscale.backend import Array
from mpiscale.comm.communicator import Communicator
from mpiscale.errors import InputError
from mpiscale.nn.flat import name_parameters
from mpiscale.nn.language_model import LanguageModel
from mpiscale.nn.module import Module
from mpiscale.nn.parameter import Parameter
from mpiscale.nn.placement import Placement
from mpiscale.parallel.data_parallel.interface import DataParallel
from mpiscale.parallel.pipeline_parallel.actions import StageMap
from mpiscale.parallel.tied_parameters import Tie
from mpiscale.tensor import Tensor


class MicroBatch(Protocol):
    """Samples that pass the pipeline together.

    Attributes:
        tokens: [b, t] ids.
        placement: where they stand in the global batch.
    """

    @property
    def tokens(self) -> Array:
        """[b, t] ids."""

    @property
    def placement(self) -> Placement:
        """Where they stand in the global batch."""

    def end(self, model: LanguageModel, hidden: Tensor) -> Tensor:
        """What becomes of the last hidden states [b, t, width]: a scalar."""


@dataclass(frozen=True)
class LanguageModelStage:
    """Some blocks of a model, before them the embedding, after them the loss."""

    model: LanguageModel
    blocks: range
    is_first: bool
    is_last: bool

    def __call__(self, x: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """x [b, t, width] -> the same, or a scalar from the last stage."""
        if x is None:
            x = self.model.embed(micro_batch.tokens, micro_batch.placement)
        for i in self.blocks:
            x = self.model.blocks[i](x, micro_batch.placement)
        if not self.is_last:
            return x
        return micro_batch.end(self.model, self.model.final_norm(x))

    def parameters(self) -> Iterator[Parameter]:
        """Those it uses; stages of one rank may share some."""
        for path in _parts(self.model, self.blocks, self.is_first, self.is_last):
            yield from _at(self.model, path).parameters()


class Absent(Module):
    """Stands where a part was that is on another rank."""

    def __init__(self, path: str) -> None:
        self.path = path

    def forward(self, *args: Any) -> Tensor:
        """Refuse."""
        raise RuntimeError(f"{self.path} is in a pipeline stage of another rank")


def split_into_stages(
    model: LanguageModel,
    stage_map: StageMap,
    blocks: Sequence[int],
    comm: Communicator,
) -> dict[int, LanguageModelStage]:
    """Keep this rank's stages of `model`, in place, before it is materialised.

    Collective over `comm`, the pipeline's ranks. Other cuts (`tensor_parallelize`) come
    before it.

    Args:
        model: serial, or cut by other strategies.
        stage_map: which rank holds which stage.
        blocks: number of blocks of each stage.
        comm: as many ranks as stage_map has.

    Returns:
        stage index -> layers, for this rank's stages.

    Raises:
        InputError: if `blocks` does not name every block of the model once.
    """
    ranges = _ranges(blocks, stage_map.stages, len(model.blocks))
    name_parameters(model)
    stages = [
        LanguageModelStage(model, part, i == 0, i == stage_map.stages - 1)
        for i, part in enumerate(ranges)
    ]
    _declare_ties(model, stages, stage_map, comm)
    mine = {i: stages[i] for i in stage_map.stages_of(comm.rank)}
    _take_out_others(model, stages, mine)
    return mine


def tell_complete(
    stages: dict[int, LanguageModelStage], dp: DataParallel
) -> Callable[[int], None]:
    """For `PipelineRunner.run`: data parallelism may reduce what is complete.

    A parameter that two stages of this rank share is complete after the later one.
    """
    uses = Counter(id(p) for stage in stages.values() for p in stage.parameters())

    def complete(stage: int) -> None:
        parameters = list(stages[stage].parameters())
        uses.subtract(map(id, parameters))
        dp.complete(p for p in parameters if uses[id(p)] == 0)

    return complete


def even_split(blocks: int, stages: int) -> list[int]:
    """Blocks of each stage, the first ones with one more: 30 over 4 is 8, 8, 7, 7.

    Raises:
        InputError: if there are fewer blocks than stages.
    """
    if blocks < stages:
        raise InputError(
            f"{blocks} layers cannot fill {stages} pipeline stages: use at most "
            f"{blocks} stages (ranks x chunks), or at least {stages} layers"
        )
    base, more = divmod(blocks, stages)
    return [base + (i < more) for i in range(stages)]


def _ranges(blocks: Sequence[int], stages: int, layers: int) -> list[range]:
    counts = list(blocks)
    if len(counts) != stages or sum(counts) != layers:
        raise InputError(
            f"a split {counts} over {len(counts)} stages holds {sum(counts)} layers; "
            f"expected {stages} stages and {layers} layers"
        )
    if min(counts) < 0 or min(counts[1:-1], default=1) < 1:
        raise InputError(
            f"a split {counts}: only the first and the last stage, which have the "
            "embedding and the head, may be without a layer"
        )
    if stages == 1:
        return [range(layers)]
    firsts = [0, *accumulate(counts)]
    return [range(a, b) for a, b in pairwise(firsts)]


def _parts(
    model: LanguageModel, blocks: range, is_first: bool, is_last: bool
) -> list[str]:
    """Paths of the parts of a stage."""
    paths = [f"blocks.{i}" for i in blocks]
    before, after = model.BEFORE_BLOCKS, model.AFTER_BLOCKS
    return [*(before if is_first else ()), *paths, *(after if is_last else ())]


def _at(model: Module, path: str) -> Module:
    return dict(model.named_modules())[path]


def _declare_ties(
    model: LanguageModel,
    stages: list[LanguageModelStage],
    stage_map: StageMap,
    comm: Communicator,
) -> None:
    """Parameters of stages on several ranks get a sum over these."""

    @cache
    def group(holders: frozenset[int]) -> Communicator:
        joined = comm.Split(0 if comm.rank in holders else 1, comm.rank)
        joined.name = "pp ranks " + ", ".join(map(str, sorted(holders)))
        return joined

    users: dict[int, set[int]] = {}
    for i, stage in enumerate(stages):
        for parameter in stage.parameters():
            users.setdefault(id(parameter), set()).add(i)
    ranks = range(stage_map.ranks)
    for parameter in model.parameters():
        if id(parameter) not in users:
            raise ValueError(
                f"{parameter.name} is in no pipeline stage: name its part in "
                f"BEFORE_BLOCKS or AFTER_BLOCKS of {type(model).__name__}"
            )
        used = users[id(parameter)]
        holders = frozenset(r for r in ranks if used & {*stage_map.stages_of(r)})
        if len(holders) > 1:
            tie = Tie(group(holders), "sum")
            if comm.rank in holders:
                parameter.ties.append(tie)


def _take_out_others(
    model: LanguageModel,
    stages: list[LanguageModelStage],
    mine: dict[int, LanguageModelStage],
) -> None:
    for i, stage in enumerate(stages):
        if i not in mine:
            for path in _parts(model, stage.blocks, stage.is_first, stage.is_last):
                model.replace(path, Absent(path))
