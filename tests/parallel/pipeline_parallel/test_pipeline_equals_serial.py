"""A model in a pipeline trains as the serial one: every schedule, every size."""

from collections import Counter

import numpy as np
import pytest

from mpiscale.comm.process_mesh import ProcessMesh
from mpiscale.models.gpt import GPTConfig
from mpiscale.models.llama import LlamaConfig
from mpiscale.parallel.data_parallel import traffic as dp_traffic
from mpiscale.parallel.data_parallel.check_replicas import check_replicas
from mpiscale.parallel.pipeline_parallel.actions import Kind
from mpiscale.parallel.pipeline_parallel.activations_in_flight import peak_bytes
from mpiscale.parallel.pipeline_parallel.schedules import LOOPED, NAMES, make_schedule
from mpiscale.parallel.pipeline_parallel.traffic import step_traffic
from mpiscale.parallel.tied_parameters import gradient_norm, synchronise
from mpiscale.train.memory import saved_bytes
from tests.communicators import world_communicator
from tests.parallel.pipeline_parallel.pipelined_twin import (
    SAMPLES,
    PipelinedTwin,
    serial,
)
from tests.parallel.replica_twin import alone, assert_equal_runs, batch

SIZES = [(name, v) for name in NAMES for v in ((1, 2, 3) if name in LOOPED else (1,))]
TINY = {"vocabulary": 23, "length": 5, "width": 8, "heads": 2}


def tiny(layers, **options):
    return GPTConfig(layers=layers, **TINY, **options)


@pytest.mark.mpi(ranks=(1, 2, 3, 4))
@pytest.mark.parametrize(("name", "v"), SIZES)
def test_every_number_of_micro_batches_equals_the_serial_run(name, v):
    """Tied embeddings (B27), dropout; 9 samples in up to 9 parts."""
    comm = world_communicator()
    for m in range(1, 10):
        schedule = make_schedule(name, comm.size, m, v)
        config = tiny(max(schedule.stages, 2), dropout=0.1)
        twin = PipelinedTwin(config, schedule, comm)
        assert_equal_runs(twin.train(config), serial(config))


@pytest.mark.mpi(ranks=(8,))
@pytest.mark.parametrize("name", NAMES)
def test_eight_ranks_equal_the_serial_run(name):
    comm = world_communicator()
    schedule = make_schedule(name, 8, 9, 2 if name in LOOPED else 1)
    config = tiny(schedule.stages)
    assert_equal_runs(
        PipelinedTwin(config, schedule, comm).train(config), serial(config)
    )


@pytest.mark.mpi(ranks=(4,))
@pytest.mark.parametrize("name", NAMES)
def test_llama_without_ties_equals_the_serial_run(name):
    comm = world_communicator()
    schedule = make_schedule(name, 4, 6)
    config = LlamaConfig(layers=9, kv_heads=1, hidden=12, **TINY)
    blocks = [0, *[1] * (schedule.stages - 2), 9 - (schedule.stages - 2)]
    twin = PipelinedTwin(config, schedule, comm, blocks=blocks)
    assert_equal_runs(twin.train(config), serial(config))


@pytest.mark.mpi(ranks=(4,))
@pytest.mark.parametrize("name", NAMES)
def test_two_replicas_of_a_pipeline_equal_the_serial_run(name):
    """B33, B34: each bucket is reduced once a step, with all gradients in it."""
    comm = world_communicator()
    mesh = ProcessMesh(comm, pp=2, dp=2)
    for m in (1, 3, 4):
        schedule = make_schedule(name, 2, m)
        config = tiny(4)
        twin = PipelinedTwin(config, schedule, mesh.along("pp"), mesh.along("dp"))
        calls_before_finish = count_calls_at_finish(twin, comm.ledger)
        comm.ledger.reset()
        assert_equal_runs(twin.train(config), serial(config))
        calls = Counter()
        for key, total in comm.ledger.totals.items():
            if key.group == "dp":
                calls[key.operation] += total.calls
        assert calls["Iallreduce"] == 2 * len(twin.dp.buckets)
        # Under way before the end of the step, each with all micro-batches in it.
        assert calls_before_finish == [k * len(twin.dp.buckets) for k in (1, 2)]
        moments = {"m": twin.optimizer.m, "v": twin.optimizer.v}
        check_replicas(2, twin.dp.replicated(moments))


def count_calls_at_finish(twin, ledger):
    """A list that gets the number of Iallreduce so far, whenever finish() begins."""
    counts, finish = [], twin.dp.finish

    def counted():
        counts.append(
            sum(
                t.calls for k, t in ledger.totals.items() if k.operation == "Iallreduce"
            )
        )
        finish()

    twin.dp.finish = counted
    return counts


@pytest.mark.mpi(ranks=(4,))
@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb_v", "dualpipe"])
def test_stages_cut_by_tensor_parallelism_equal_the_serial_run(name, sequences):
    comm = world_communicator()
    mesh = ProcessMesh(comm, pp=2, tp=2)
    schedule = make_schedule(name, 2, 4)
    config = tiny(4)
    twin = PipelinedTwin(
        config, schedule, mesh.along("pp"), tp=mesh.along("tp"), sequences=sequences
    )
    losses, norms, *_, validation = twin.train(config)
    expected = serial(config)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-12)
    np.testing.assert_allclose(norms, expected[1], rtol=1e-12)
    np.testing.assert_allclose(validation, expected[4], rtol=1e-12)


@pytest.mark.mpi(ranks=(2, 3))
def test_messages_above_the_eager_limit_equal_the_serial_run():
    comm = world_communicator()
    config = GPTConfig(vocabulary=64, length=64, layers=6, width=64, heads=2)
    for name in ("1f1b", "zb_h1", "zb_v", "dualpipe"):
        twin = PipelinedTwin(config, make_schedule(name, comm.size, 4), comm)
        assert_equal_runs(twin.train(config), serial(config))


@pytest.mark.mpi(ranks=(1, 2, 3, 4))
@pytest.mark.parametrize("name", NAMES)
def test_the_ledger_equals_the_traffic_formula_to_the_byte(name):
    comm = world_communicator()
    for tied in (True, False):
        schedule = make_schedule(name, comm.size, 4)
        config = tiny(8, tied=tied)
        twin = PipelinedTwin(config, schedule, comm)
        twin.step(batch(config, SAMPLES, 1), 1)  # its headers go once
        sizes = [len(part) for part in np.array_split(np.arange(SAMPLES), 4)]
        activation = config.length * config.width
        formula = step_traffic(
            schedule, sizes, activation, 8, twin.dp.parameters, 8, comm
        )
        before = comm.ledger.sent_bytes()
        micro_batches = twin.micro_batches(batch(config, SAMPLES, 2), 4, noise=None)
        twin.dp.zero_grad()
        twin.runner.run(schedule, micro_batches)
        synchronise_and_norm(twin, comm)
        assert comm.ledger.sent_bytes() - before == formula.sent_bytes
        assert (formula.sent_bytes > 0) == (comm.size > 1)
    assert dp_traffic.step_traffic([1], 8, alone()).sent_bytes == 0


def synchronise_and_norm(twin, comm):
    synchronise(twin.dp.pieces())
    gradient_norm(twin.dp.pieces(), comm)


@pytest.mark.mpi(ranks=(4,))
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"])
def test_live_activation_bytes_are_the_schedules_peak(name):
    """B73: what graphs keep, measured after every action."""
    comm = world_communicator()
    chunks = 2 if name in LOOPED else 1
    config = tiny(8)
    one = None
    for m in (4, 8, 16):
        schedule = make_schedule(name, 4, m, chunks)
        twin = PipelinedTwin(config, schedule, comm)
        live = []

        def after(action, run, live=live, twin=twin):
            live.append(saved_bytes(run.outputs.values(), twin.dp.arrays()))

        twin.runner.after = after
        twin.step(batch(config, m, 1), 1)
        if comm.rank in (0, 3):
            continue  # have embedding or loss, too
        one = one or live[first_forward(schedule, comm.rank)]
        assert max(live) == peak_bytes(schedule.actions[comm.rank]) * one
        assert live[-1] == 0


def first_forward(schedule, rank):
    kinds = [action.kind for action in schedule.actions[rank]]
    return kinds.index(Kind.F)
