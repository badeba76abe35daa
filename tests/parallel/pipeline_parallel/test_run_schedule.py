"""The loop that carries out schedules, with stages that multiply by a number."""

import gc
import time
import tracemalloc
import weakref

import numpy as np
import pytest

from mpiscale.ops.arithmetic import multiply
from mpiscale.ops.reductions import sum as sum_of
from mpiscale.parallel.pipeline_parallel.actions import Kind
from mpiscale.parallel.pipeline_parallel.run_schedule import PipelineRunner
from mpiscale.parallel.pipeline_parallel.schedules import (
    LOOPED,
    NAMES,
    forward_schedule,
    make_schedule,
)
from mpiscale.tensor import Tensor, no_grad
from tests.communicators import world_communicator

FACTORS = [2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0, 23.0, 29.0, 31.0, 37.0]
SIZES = [(name, v) for name in NAMES for v in ((1, 2, 3) if name in LOOPED else (1,))]


class Multiply:
    """Stage s: times FACTORS[s] and a weight of 1. The micro-batch is its input."""

    def __init__(self, stage, stages):
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.factor = FACTORS[stage % len(FACTORS)]
        self.weight = Tensor(np.ones(1), requires_grad=True)
        self.inputs, self.seen = [], []

    def __call__(self, x, micro_batch):
        if self.is_first:
            x = Tensor(micro_batch.copy(), requires_grad=True)
            self.inputs.append(x)
        self.seen.append(x.data.copy())
        y = multiply(multiply(x, self.weight), Tensor(self.factor))
        return sum_of(y) if self.is_last else y


def pipeline(schedule, comm, **options):
    stages = {
        s: Multiply(s, schedule.stages) for s in schedule.stage_map.stages_of(comm.rank)
    }
    options.setdefault("key", lambda m: m.shape)
    return stages, PipelineRunner(dict(stages), comm, **options)


@pytest.mark.mpi(ranks=(1, 2, 3, 4))
@pytest.mark.parametrize(("name", "v"), SIZES)
def test_products_and_gradients(name, v):
    """B28, B29: any number of micro-batches; two ranks are each other's neighbours."""
    comm = world_communicator()
    for m in range(1, 10):
        schedule = make_schedule(name, comm.size, m, v)
        stages, runner = pipeline(schedule, comm)
        product = float(np.prod(FACTORS[: schedule.stages]))
        batch = [np.full(3, i + 1.0) for i in range(m)]
        losses = runner.run(schedule, batch)
        np.testing.assert_array_equal(losses, [3 * product * (i + 1) for i in range(m)])
        for stage in stages.values():
            for x in stage.inputs:
                np.testing.assert_array_equal(x.grad, product)
        weights = comm.allreduce(
            {s: gradient(stage) for s, stage in stages.items()},
            op=merged,
        )
        total = 3 * product * m * (m + 1) / 2
        assert weights == dict.fromkeys(range(schedule.stages), total)


def gradient(stage):
    """0 where no micro-batch came by: with one, a second direction has none."""
    return 0.0 if stage.weight.grad is None else stage.weight.grad.item()


def merged(a, b):
    """Gradients by stage; a stage that two ranks hold has their sum."""
    return {s: a.get(s, 0) + b.get(s, 0) for s in sorted(a.keys() | b.keys())}


@pytest.mark.mpi(ranks=(2, 4))
@pytest.mark.parametrize("name", NAMES)
def test_shapes_may_change_between_micro_batches_and_steps(name):
    """B30: every micro-batch arrives whole, with its own shape and values."""
    comm = world_communicator()
    schedule = make_schedule(name, comm.size, 5)
    _, runner = pipeline(schedule, comm)
    product = float(np.prod(FACTORS[: schedule.stages]))
    for shapes in ([3, 3, 2, 3, 2], [1, 5, 4, 3, 2], [129, 129, 128, 1, 3]):
        batch = [np.arange(1.0, n + 1) + i for i, n in enumerate(shapes)]
        losses = runner.run(schedule, batch)
        np.testing.assert_array_equal(losses, [product * x.sum() for x in batch])
    headers = comm.ledger.table().count("Isend")
    assert headers > 0 or comm.size == 1


@pytest.mark.mpi(ranks=(2,))
def test_a_header_goes_ahead_once_for_each_key():
    comm = world_communicator()
    schedule = make_schedule("1f1b", 2, 4)
    _, runner = pipeline(schedule, comm)
    batch = [np.ones(n) for n in (3, 2, 3, 3)]
    sent = []
    for _ in range(2):
        before = comm.ledger.sent_bytes()
        runner.run(schedule, batch)
        sent.append(comm.ledger.sent_bytes() - before)
    messages = sum(x.nbytes for x in batch)
    losses = sent[1] - messages  # the all-reduce of four numbers
    assert losses == 2 * 32 - 32
    assert sent[0] - sent[1] == (2 * 80 if comm.rank == 0 else 0)


@pytest.mark.mpi(ranks=(2,))
def test_a_key_that_hides_a_change_of_shape_is_an_error():
    comm = world_communicator().Split(0)  # of its own: a message is left behind
    schedule = make_schedule("gpipe", 2, 2)
    _, runner = pipeline(schedule, comm, key=lambda m: "all alike")
    batch = [np.ones(3), np.ones(2)]
    if comm.rank == 0:
        with pytest.raises(ValueError, match=r"float64 \(2,\), but float64 \(3,\)"):
            runner.run(schedule, batch)
    comm.Barrier()


@pytest.mark.mpi(ranks=(2,))
@pytest.mark.parametrize("n", [128, 8192, 131072])
def test_a_slow_receiver_gets_what_was_sent(n):
    """B32: below and above the eager limit; freed arrays would be overwritten."""
    comm = world_communicator()
    m = 8

    class Slow(Multiply):
        def __call__(self, x, micro_batch):
            if not self.is_first:
                time.sleep(0.02)
            y = super().__call__(x, micro_batch)
            trash = [np.full(n, np.nan) for _ in range(4)]  # takes freed memory
            del trash
            return y

    schedule = make_schedule("gpipe", 2, m)
    stage = Slow(comm.rank, 2)
    runner = PipelineRunner({comm.rank: stage}, comm, key=lambda x: x.shape)
    runner.run(schedule, [np.full(n, float(i)) for i in range(m)])
    if comm.rank == 1:
        for i, x in enumerate(stage.seen):
            np.testing.assert_array_equal(x, FACTORS[0] * i)


@pytest.mark.mpi(ranks=(2,))
def test_an_output_is_freed_when_it_has_been_sent():
    comm = world_communicator()
    n, m = 1 << 18, 6
    outputs = []

    class Watched(Multiply):
        def __call__(self, x, micro_batch):
            y = super().__call__(x, micro_batch)
            outputs.append(weakref.ref(y.data))
            return y

    schedule = make_schedule("gpipe", 2, m)
    live = []

    def after(action, run):
        if action.kind is Kind.BW:
            gc.collect()
            live.append(sum(ref() is not None for ref in outputs))

    runner = PipelineRunner(
        {comm.rank: Watched(comm.rank, 2)}, comm, key=lambda x: x.shape, after=after
    )
    runner.run(schedule, [np.ones(n) for _ in range(m)])
    if comm.rank == 0:  # the last send is tested after the first backward
        assert live[1:] == [0] * (m - 1)


@pytest.mark.mpi(ranks=(2,))
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_under_way_or_kept_after_a_step(name):
    comm = world_communicator()
    schedule = make_schedule(name, 2, 4)
    kept = []

    def after(action, run):
        done = [p for p, x in run.inputs.items() if x.grad is not None]
        kept.extend(run.inputs[p].data for p in done)

    _, runner = pipeline(schedule, comm, after=after)
    runner.run(schedule, [np.ones(1 << 15)] * 4)
    assert all(values.strides == (0,) for values in kept)  # a shape without memory
    assert not any(np.isnan(entry.end) for entry in comm.ledger.recent)


@pytest.mark.mpi(ranks=(2, 3))
@pytest.mark.parametrize("name", NAMES)
def test_forward_only_gives_the_same_losses_and_keeps_nothing(name):
    comm = world_communicator()
    training = make_schedule(name, comm.size, 4)
    stages, runner = pipeline(training, comm)
    batch = [np.full(3, i + 1.0) for i in range(5)]
    with no_grad():
        losses = runner.run(forward_schedule(training, 5), batch)
    product = float(np.prod(FACTORS[: training.stages]))
    np.testing.assert_array_equal(losses, [3 * product * (i + 1) for i in range(5)])
    assert all(stage.weight.grad is None for stage in stages.values())


@pytest.mark.mpi(ranks=(1, 2, 4))
@pytest.mark.parametrize("name", NAMES)
def test_last_gradients_are_told_once_a_stage_and_not_too_early(name):
    """B33, B34: a reduction at that moment has every micro-batch's gradient in it."""
    comm = world_communicator()
    for m in (1, 3, 6):
        schedule = make_schedule(name, comm.size, m)
        stages, runner = pipeline(schedule, comm)
        told = {}

        def last(stage, stages=stages, told=told):
            assert stage not in told
            told[stage] = gradient(stages[stage])

        runner.run(schedule, [np.full(2, i + 1.0) for i in range(m)], last)
        assert told.keys() == stages.keys()
        for s, stage in stages.items():
            assert told[s] == gradient(stage)


@pytest.mark.mpi(ranks=(4,))
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_memory_does_not_grow_with_micro_batches(name):
    """B73: peak over M at equal micro-batches; nothing is left after many steps."""
    comm = world_communicator()
    n = 1 << 16
    peaks = []
    for m in (8, 16, 32):
        schedule = make_schedule(name, 4, m)
        _, runner = pipeline(schedule, comm)
        stage = next(iter(runner.stages.values()))
        batch = [np.ones(n)] * m

        def forget(action, run, stage=stage):
            stage.inputs.clear(), stage.seen.clear()

        runner.after = forget
        runner.run(schedule, batch)
        comm.Barrier()
        tracemalloc.start()
        runner.run(schedule, batch)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] > n * 8
    # How many messages are in flight depends on who runs ahead: P at most each way.
    # What grows with M would hold 24 arrays more, as GPipe does.
    assert max(peaks) - min(peaks) < 8.5 * n * 8, peaks


@pytest.mark.mpi(ranks=(2,))
def test_what_does_not_fit_the_schedule_is_refused_on_all_ranks():
    comm = world_communicator()
    schedule = make_schedule("1f1b", 2, 2)
    _, runner = pipeline(schedule, comm)
    with pytest.raises(ValueError, match="is for 2 micro-batches, got 3"):
        runner.run(schedule, [np.ones(1)] * 3)
    with pytest.raises(ValueError, match="is for 3 ranks, got 2"):
        runner.run(make_schedule("1f1b", 3, 2), [np.ones(1)] * 2)
    with pytest.raises(ValueError, match=r"\[0, 3\] stages|\[1, 2\] stages"):
        runner.run(make_schedule("zb_v", 2, 2), [np.ones(1)] * 2)
    comm.Barrier()


@pytest.mark.mpi(ranks=(2,))
def test_an_activation_of_too_many_axes_is_an_error():
    comm = world_communicator()
    schedule = make_schedule("1f1b", 2, 1)
    _, runner = pipeline(schedule, comm)
    if comm.rank == 0:
        with pytest.raises(ValueError, match="has 9 axes, expected at most 8"):
            runner.run(schedule, [np.ones((1,) * 9)])
    comm.Barrier()
