"""A model whose stages are on different ranks, for the training loop.

The samples of a step become the micro-batches of a schedule; evaluation and generation
are schedules of forward passes alone. At the end of a run the last step's timeline is
drawn above the one that the schedule predicts from the same passes' median times.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np

from mpiscale.backend import Array
from mpiscale.comm.clock import clock_offset
from mpiscale.comm.communicator import Communicator
from mpiscale.comm.trace import Slice
from mpiscale.comm.world import World
from mpiscale.data.batches import Batch
from mpiscale.errors import InputError
from mpiscale.nn.language_model import LanguageModel
from mpiscale.nn.placement import Noise, Placement
from mpiscale.parallel.data_parallel.interface import DataParallel
from mpiscale.parallel.pipeline_parallel.actions import Action, Kind, Schedule
from mpiscale.parallel.pipeline_parallel.draw_schedule import (
    Timeline,
    as_slices,
    draw,
)
from mpiscale.parallel.pipeline_parallel.proof_sheet import bubble_of
from mpiscale.parallel.pipeline_parallel.run_schedule import PipelineRunner, Run
from mpiscale.parallel.pipeline_parallel.schedules import (
    forward_schedule,
)
from mpiscale.parallel.pipeline_parallel.simulate_schedule import (
    CostTable,
    Span,
    simulate,
)
from mpiscale.parallel.pipeline_parallel.split_into_stages import (
    split_into_stages,
    tell_complete,
)
from mpiscale.tensor import Tensor
from mpiscale.train.config import TrainConfig
from mpiscale.train.memory import Root, saved_bytes
from mpiscale.train.passes import Passes, placement_of, sample

PHASES = {Kind.F: "forward", Kind.B: "backward", Kind.BW: "backward", Kind.W: "weights"}


@dataclass(frozen=True)
class Samples:
    """A micro-batch that ends with its part of the loss."""

    tokens: Array
    placement: Placement
    labels: Array
    valid: int

    def end(self, model: LanguageModel, hidden: Tensor) -> Tensor:
        """Cross entropy."""
        return model.loss_of(hidden, self.labels, self.valid)


@dataclass(frozen=True)
class Prompt:
    """A micro-batch that ends with the token that follows."""

    tokens: Array
    placement: Placement
    place: int  # of the last token; padding may follow
    temperature: float
    key: int

    def end(self, model: LanguageModel, hidden: Tensor) -> Tensor:
        """The token's id, which float64 holds exactly."""
        token = sample(model, hidden, self.place, self.temperature, self.key)
        return Tensor(np.float64(token))


class Pipelined(Passes):
    """This rank's stages, and the schedules that run them.

    Args:
        model: is split in place, before it is materialised; collective over `comm`.
        comm: the ranks of this pipeline.
        schedule: of a training step.
        blocks: number of blocks of each stage.
    """

    def __init__(
        self,
        world: World,
        config: TrainConfig,
        model: LanguageModel,
        comm: Communicator,
        schedule: Schedule,
        blocks: Sequence[int],
    ) -> None:
        if config.accumulate > 1:
            raise InputError(
                "--accumulate is for models on one rank: a pipeline has --micro-batches"
            )
        self.world, self.config, self.comm = world, config, comm
        self.schedule, self.model = schedule, model
        self.stages = split_into_stages(model, schedule.stage_map, blocks, comm)
        self.runner = PipelineRunner(
            dict(self.stages), comm, lambda m: m.tokens.shape, self._watch, self._after
        )
        self._forward = cache(lambda m: forward_schedule(schedule, m))
        self._spans: list[Span] = []
        self._last_step: tuple[Span, ...] = ()
        self._timelines: list[Timeline] = []
        self._begin = 0.0  # of the measured timeline, on rank 0's clock
        self._peak, self._held_elsewhere = 0, [np.empty(0)]

    def forward_backward(self, batch: Batch, noise: Noise, dp: DataParallel) -> float:
        """A step of the schedule; gradients are complete stage by stage."""
        self._spans.clear()
        self._held_elsewhere = dp.arrays()
        complete = tell_complete(self.stages, dp)
        with dp.no_sync(), self.world.comm.ledger.phase("pipeline"):
            micro_batches = self._micro_batches(batch, self.schedule, noise)
            losses = self.runner.run(self.schedule, micro_batches, complete)
        self._last_step = tuple(self._spans)
        if self.config.profile == "memory":
            self.activations = self._peak
        return float(losses.sum())

    def loss(self, batch: Batch) -> float:
        """Forward only, in as many micro-batches or, of few samples, fewer."""
        count = min(self.schedule.micro_batches, max(len(batch.samples), 1))
        schedule = self._forward(count)
        losses = self.runner.run(schedule, self._micro_batches(batch, schedule, None))
        return float(losses.sum())

    def next_token(self, window: Array, temperature: float, key: int) -> int:
        """One micro-batch through all stages; every rank gets the token."""
        t = window.shape[1]
        tokens, placement, _ = self.model.arrange(window, Placement.whole(1, t), None)
        prompt = Prompt(tokens, placement, t - 1, temperature, key)
        return int(self.runner.run(self._forward(1), [prompt])[0])

    def _micro_batches(
        self, batch: Batch, schedule: Schedule, noise: Noise | None
    ) -> list[Samples]:
        count = schedule.micro_batches
        return [self._samples(batch.part(i, count), noise) for i in range(count)]

    def _samples(self, part: Batch, noise: Noise | None) -> Samples:
        placement = placement_of(part, self.config, noise)
        tokens, placement, labels = self.model.arrange(
            part.tokens, placement, part.labels
        )
        assert labels is not None
        return Samples(tokens, placement, labels, part.valid)

    @contextmanager
    def _watch(self, action: Action) -> Iterator[None]:
        start = time.perf_counter()
        with self.world.comm.ledger.phase(PHASES[action.kind], str(action)):
            yield
        span = Span(self.comm.rank, action, start, time.perf_counter())
        self._spans.append(span)

    def _after(self, action: Action, run: Run) -> None:
        """Look for the largest memory, in the first step."""
        if self.config.profile == "memory" and self.activations is None:
            put_off = [call for calls in run.put_off.values() for call in calls]
            live: list[Root] = [*run.outputs.values(), *put_off]
            held = saved_bytes(live, self._held_elsewhere)
            self._peak = max(self._peak, held)

    # What the run says at its end

    def report(self) -> None:
        """Rank 0 prints measured and predicted bubble and draws both timelines."""
        offset = clock_offset(self.comm)
        mine = [
            (rank, tuple(action), start + offset, end + offset)
            for rank, action, start, end in self._last_step
        ]
        everyones = self.comm.gather(mine)
        if everyones is None or self.world.rank != 0:
            return
        spans = [
            Span(rank, Action(*action), start, end)
            for of_rank in everyones
            for rank, action, start, end in of_rank
        ]
        self._begin = min(span.start for span in spans)
        self._timelines = measured_and_predicted(self.schedule, spans)
        for timeline in self._timelines:
            print(timeline.title)
        if find_spec("matplotlib") is not None:
            path = self.config.out / "timeline.png"
            draw(self._timelines, path)
            print(f"wrote {path}")

    def predicted(self) -> list[Slice]:
        """The predicted timeline, from where the measured one begins."""
        return [
            slice_
            for timeline in self._timelines[1:]
            for slice_ in as_slices(timeline, "predicted", self._begin)
        ]


def measured_and_predicted(schedule: Schedule, spans: list[Span]) -> list[Timeline]:
    """One step as it ran, and as the schedule says for the passes' median times.

    Args:
        schedule: that was run.
        spans: of all ranks' passes, in seconds on one clock.
    """
    begin = min(span.start for span in spans)
    ran = [s._replace(start=s.start - begin, end=s.end - begin) for s in spans]
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for span in ran:
        times[span.action.kind, span.action.stage].append(span.end - span.start)
    medians = {place: statistics.median(of) for place, of in times.items()}
    expected = simulate(schedule, CostTable(medians))
    timelines = []
    for name, timeline in (("measured", ran), ("predicted", expected)):
        cost, bubble = bubble_of(timeline, schedule.ranks)
        title = f"{schedule.name} {name}: bubble {100 * bubble / cost:.1f} %"
        title += f" of {1e3 * cost:.1f} ms"
        timelines.append(Timeline(title, schedule, timeline, "seconds"))
    return timelines
