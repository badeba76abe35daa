"""The ring against MPI's own all-reduce, and its traffic against the formula."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpiscale.comm import traffic
from mpiscale.comm.algorithms.ring_all_reduce import ring_all_reduce
from tests.communicators import world_communicator
from tests.mpi_job import mpirun_command, rank_environment

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "ring_all_reduce_step_by_step.py"


@pytest.mark.mpi(ranks=(1, 2, 3, 4, 8))
def test_ring_equals_the_all_reduce_of_mpi_and_sends_what_the_formula_says():
    rng = np.random.default_rng(MPI.COMM_WORLD.rank)
    for shape in ((), (0,), (1,), (2, 0), (5,), (3, 7), (10_001,)):
        comm = world_communicator()
        x = rng.normal(size=shape)
        before, expected = x.copy(), np.empty(shape)
        total = ring_all_reduce(x, comm)
        sent = comm.ledger.sent_bytes()
        comm.Allreduce(x, expected)
        np.testing.assert_allclose(total, expected, rtol=1e-12, atol=1e-12)
        assert (total.shape, total.dtype) == (x.shape, x.dtype)
        np.testing.assert_array_equal(x, before)
        assert sent == 8 * traffic.all_reduce_sent(x.size, comm.size, comm.rank)
        assert comm.ledger.sent_bytes() == 2 * sent  # booked alike for MPI's own


@pytest.mark.mpi(ranks=(1, 2, 3, 4))
def test_ring_runs_on_a_bare_mpi4py_communicator():
    comm = MPI.COMM_WORLD
    x = np.arange(7.0) + comm.rank
    expected = comm.size * np.arange(7.0) + comm.size * (comm.size - 1) / 2
    np.testing.assert_array_equal(ring_all_reduce(x, comm), expected)
    np.testing.assert_array_equal(
        ring_all_reduce(x, comm, np.maximum), np.arange(7.0) + comm.size - 1
    )


@pytest.mark.mpi(ranks=(3,))
def test_ring_takes_strided_and_integer_arrays():
    comm = world_communicator()
    x = np.arange(12).reshape(3, 4)[:, ::-2].T
    np.testing.assert_array_equal(ring_all_reduce(x, comm), 3 * x)


@pytest.mark.mpi(ranks=(4,))
def test_ring_sums_half_precision_in_float32():
    comm = world_communicator()
    for half in (np.float16, ml_dtypes.bfloat16):
        x = np.full(10, 2048 if comm.rank == 0 else 3, half)
        total = ring_all_reduce(x, comm)
        assert total.dtype == half
        np.testing.assert_array_equal(total, np.full(10, 2057, np.float32).astype(half))


@pytest.mark.mpi(ranks=(2, 3))
def test_ring_of_messages_above_the_eager_limit():
    x = np.full(3_000_000, MPI.COMM_WORLD.rank + 1.0, np.float32)
    p = MPI.COMM_WORLD.size
    assert (ring_all_reduce(x, world_communicator()) == p * (p + 1) / 2).all()


@pytest.mark.parametrize(("ranks", "elements"), [(1, 3), (3, 10), (4, 2)])
def test_example_shows_every_step_and_agrees_with_mpi(ranks, elements):
    arguments = [sys.executable, str(EXAMPLE), "--elements", str(elements)]
    ran = subprocess.run(
        [*mpirun_command(ranks), *arguments],
        env=rank_environment(ranks) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count(", step ") == 2 * (ranks - 1)
    assert "equal to MPI's Allreduce on all ranks: yes" in ran.stdout
    total = 8 * 2 * (ranks - 1) * elements
    assert f"on average: {total / ranks:g} = 2 (p - 1) / p n x 8 bytes" in ran.stdout
    if ranks == 3:
        assert "rank 1   chunk 0 to rank 2   a1        a1        a0+a1" in ran.stdout
