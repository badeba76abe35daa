"""What a rank holds under ZeRO, where it lies, and what is sent."""

from contextlib import nullcontext

import numpy as np
import pytest

from mpiscale.backend import FLOAT32, FLOAT64
from mpiscale.models.gpt import GPT, GPTConfig
from mpiscale.nn.layers import Linear
from mpiscale.nn.module import Module
from mpiscale.nn.parameter import Constant, Parameter
from mpiscale.optim.adamw import AdamW
from mpiscale.optim.sgd import SGD
from mpiscale.parallel.data_parallel import traffic as dp_traffic
from mpiscale.parallel.data_parallel.bucketed_overlap import BucketedOverlap
from mpiscale.parallel.zero.memory import state_bytes
from mpiscale.parallel.zero.traffic import step_traffic
from mpiscale.parallel.zero.unit import layer_groups, make_units
from mpiscale.tensor import Tensor
from tests.parallel.data_parallel.test_gradients import Rows, backward
from tests.parallel.replica_twin import (
    STAGES,
    alone,
    assert_equal_runs,
    batch,
    make,
    step,
    train,
    whole,
    world,
)

CONFIG = GPTConfig(vocabulary=13, length=6, layers=3, width=16, heads=2)
every_stage = pytest.mark.parametrize("stage", (1, 2, 3))


class Matrix(Module):
    """One weight W [3, 2] = 0 ... 5."""

    def __init__(self):
        self.linear = Linear(3, (2,), Counting(), bias=False)

    def forward(self, x):
        return self.linear(x)


class Counting:
    """0, 1, 2, ... in the parameter's order."""

    def __call__(self, shape, dtype, seed, name):
        return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


@every_stage
@pytest.mark.mpi(ranks=(2,))
def test_shards_follow_the_flat_order_not_the_first_axis(stage):
    comm, model = world(), Matrix()
    dp = STAGES[stage](model, comm, 1, FLOAT64)
    (piece,) = dp.pieces()
    assert piece.data.tolist() == [[0, 1, 2], [3, 4, 5]][comm.rank]
    dp.zero_grad()
    model(Tensor(np.ones((1, 3)))).backward(np.full((1, 2), 0.5))
    dp.finish()
    SGD(dp).step(1.0)
    dp.publish()
    assert whole(dp, "data")["linear.weight"].tolist() == [-1, 0, 1, 2, 3, 4]


@every_stage
@pytest.mark.mpi(ranks=(4,))
def test_padding_is_in_no_piece_and_never_changes(stage):
    comm, model = world(), Rows(13)
    dp = STAGES[stage](model, comm, 1, FLOAT64)
    optimizer = AdamW(dp)
    dp.zero_grad()
    backward(model, {0: np.arange(13.0)})
    dp.finish()
    optimizer.step(0.1)
    assert comm.allreduce(dp.size) == 13 == comm.allreduce(optimizer.m.size)
    places = comm.allgather([(p.place.start, p.place.stop) for p in dp.pieces()])
    assert places == [[(0, 4)], [(4, 8)], [(8, 12)], [(12, 13)]]
    chunk = dp.value_chunks[0]
    assert not chunk[dp.units[0].real :].any()
    assert whole(dp, "grad")["layers.0.weight"].tolist() == [4.0 * i for i in range(13)]


@pytest.mark.mpi(ranks=(1, 2, 3, 4, 8))
def test_the_ledger_equals_the_traffic_formula_to_the_byte():
    comm = world()
    for accumulate in (1, 3):
        for kind in ("plain", "overlap", 1, 2, 3):
            model, dp = make(kind, CONFIG, comm, dtype=FLOAT32)
            optimizer = AdamW(dp)
            for k in (1, 2):  # ZeRO-3 gathers ahead only in the second
                before = comm.ledger.sent_bytes()
                data = batch(CONFIG, 3 * comm.size, k)
                training_step(model, dp, optimizer, data, k, accumulate)
                sent = comm.ledger.sent_bytes() - before
                expected = formula(kind, dp, comm, accumulate)
                assert sent == expected.sent_bytes, (kind, accumulate, k)


def training_step(model, dp, optimizer, data, k, accumulate):
    """As `step` of the twin, whose object messages would count: arrays alone."""
    from mpiscale.nn.placement import Placement
    from mpiscale.parallel.tied_parameters import gradient_norm

    tokens, labels = data
    rows = np.array_split(np.arange(len(tokens)), dp.samples[1])[dp.samples[0]]
    dp.zero_grad()
    for i, part in enumerate(np.array_split(rows, accumulate)):
        placement = Placement(part, np.arange(6), 6)
        loss = model.loss(tokens[part], labels[part], placement, 100)
        if i < accumulate - 1:
            with dp.no_sync():
                loss.backward()
        else:
            loss.backward()
    dp.finish()
    dp.total_loss(loss.item())
    gradient_norm(dp.pieces(), *dp.shard_groups)
    optimizer.step(1e-3)
    dp.publish()


def formula(kind, dp, comm, accumulate):
    if kind in STAGES:
        chunks = [unit.chunk for unit in dp.units]
        return step_traffic(kind, chunks, 4, 4, accumulate, comm)
    lengths = [dp.size]
    if isinstance(dp, BucketedOverlap):
        lengths = [bucket.place.stop - bucket.place.start for bucket in dp.buckets]
    return dp_traffic.step_traffic(lengths, 4, comm)


@pytest.mark.mpi(ranks=(1, 2, 4))
def test_the_traffic_is_that_of_the_paper():
    comm, psi = world(), sum(p.full_size for p in GPT(CONFIG).parameters())
    n = comm.size
    share = (n - 1) / n * psi * 4
    scalars = 2 * (16 * (n - 1) / n)  # loss and norm, on average over the ranks
    for stage, times in ((1, 2), (2, 2), (3, 3)):
        _, dp = make(stage, CONFIG, comm, dtype=FLOAT32)
        assert sum(unit.padded for unit in dp.units) == psi  # 4 divides every unit
        sent = comm.allreduce(formula(stage, dp, comm, 1).sent_bytes) / n
        agreements = (2 * len(dp.units) + 1) * (n - 1) * 8 if stage == 3 else 0
        assert sent == times * share + agreements + scalars


@pytest.mark.mpi(ranks=(1, 2, 4))
def test_what_a_rank_holds_equals_the_formula_to_the_byte():
    comm, psi = world(), sum(p.full_size for p in GPT(CONFIG).parameters())
    for stage, kind in enumerate(("plain", 1, 2, 3)):
        _, dp = make(kind, CONFIG, comm, dtype=FLOAT32)
        optimizer = AdamW(dp)
        state = optimizer.m.nbytes + optimizer.v.nbytes
        assert (*dp.held(), state) == state_bytes(stage, psi, comm.size)
        values = [p.data for p in dp.parameters if "data" in vars(p)]
        owners = map(owner, values + getattr(dp, "value_chunks", []))
        live = {id(array): array for array in owners}
        assert sum(array.nbytes for array in live.values()) == dp.held().parameters


def owner(array):
    return array if array.base is None else owner(array.base)


def test_state_bytes_give_the_papers_table():
    for billions, ranks, stage, gigabytes in PAPERS_TABLE:
        state = sum(state_bytes(stage, int(billions * 1e9), ranks, 2, 2, 12))
        assert round(state / 1e9, 3 - len(str(int(gigabytes)))) == pytest.approx(
            gigabytes, rel=0.012
        )
    with pytest.raises(ValueError, match="stages 0, 1, 2 and 3, got 4"):
        state_bytes(4, 1, 1)


# Rajbhandari et al. (2020), table 1: (10^9 parameters, ranks, stage, GB a rank).
PAPERS_TABLE = [
    (7.5, 1, 1, 120), (7.5, 4, 1, 52.5), (7.5, 16, 1, 35.6), (7.5, 64, 1, 31.4),
    (7.5, 256, 1, 30.4), (7.5, 1024, 1, 30.1), (7.5, 4, 2, 41.3), (7.5, 16, 2, 21.6),
    (7.5, 64, 2, 16.6), (7.5, 256, 2, 15.4), (7.5, 1024, 2, 15.1), (7.5, 4, 3, 30),
    (7.5, 16, 3, 7.5), (7.5, 64, 3, 1.88), (7.5, 256, 3, 0.47), (7.5, 1024, 3, 0.12),
    (128, 4, 1, 896), (128, 1024, 2, 257), (128, 1024, 3, 2),
    (1000, 4, 1, 7000), (1000, 1024, 3, 15.6),
]  # fmt: skip


@every_stage
@pytest.mark.mpi(ranks=(4, 8))
def test_hybrid_sharding_equals_the_serial_run(stage):
    comm = world()
    node, across = comm.Split(comm.rank // 2), comm.Split(comm.rank % 2)
    serial = train("plain", CONFIG, alone(), samples=9)
    assert_equal_runs(
        train(stage, CONFIG, node, samples=9, accumulate=2, replicas=across), serial
    )


UNEQUAL = pytest.raises(
    RuntimeError, match=r"rank 0: the end of backward; rank 1: layers\.1"
)


@pytest.mark.mpi(ranks=(2,))
def test_ranks_that_call_a_layer_unequally_often_get_one_error():
    comm, model = world().Split(), Rows(4, 4)  # reductions stay in flight on it
    dp = STAGES[3](model, comm, 1, FLOAT64)
    unequal = [0, 1, 1, 1] if comm.rank else [0, 1]
    for calls, expected in (([0, 1], nullcontext()), (unequal, UNEQUAL)):
        dp.zero_grad()
        with expected:
            for y in model(calls):
                y.backward(np.ones((1, 4)))
            dp.finish()


@pytest.mark.mpi(ranks=(2,))
def test_prefetching_asks_for_the_layers_in_the_recorded_order():
    comm = world()
    model, dp = make(3, CONFIG, comm)
    optimizer = AdamW(dp)
    started = []
    inner = dp._start_gather
    dp._start_gather = lambda i: (started.append((i, len(dp._whole))), inner(i))
    for k in (1, 2):
        started.clear()
        step(model, dp, optimizer, batch(CONFIG, 4, k), k)
        assert [i for i, _ in started] == [0, 1, 2, 3, 0, 3, 2, 1]
    # How many units are whole when a gather starts: the one that runs, and the rest
    # (unit 0) until the head has run. Its own gather for backward follows at once.
    assert [held for _, held in started] == [0, 1, 2, 2, 0, 1, 2, 2]


def test_released_values_cannot_be_read():
    model, _ = make(3, CONFIG, alone())
    with pytest.raises(RuntimeError, match=r"mlp.up.weight.*ZeRO-3 gathers it while"):
        print(model.blocks[0].mlp.up.weight.data)


class Keeping(Module):
    """An op that captures the weight's array, as none should."""

    def __init__(self):
        self.weight = Parameter((3,), Constant(1.0))

    def forward(self, x):
        kept = self.weight.data
        return Tensor.from_op(x * kept, (self.weight,), lambda grad: (grad * kept,))


def test_an_op_that_keeps_released_values_is_found_out():
    model = Keeping()
    STAGES[3](model, alone(), 1, FLOAT64)
    with pytest.raises(RuntimeError, match="keeps values of embeddings and head"):
        model(np.ones(3))


def test_units_are_the_layers_and_the_rest():
    model = GPT(CONFIG)
    names = [name for name, _ in layer_groups(model)]
    assert names == ["", "blocks.0", "blocks.1", "blocks.2"]
    units = make_units(layer_groups(model), alone())
    assert sum(unit.size for unit in units) == sum(
        p.full_size for p in model.parameters()
    )
