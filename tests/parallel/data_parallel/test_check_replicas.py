"""A replica that differs in one bit is found, and named."""

import numpy as np
import pytest

from mpiscale.models.gpt import GPTConfig
from mpiscale.optim.adamw import AdamW
from mpiscale.parallel.data_parallel.check_replicas import (
    ReplicaError,
    check_replicas,
    digest,
)
from tests.parallel.replica_twin import batch, make, step, world

CONFIG = GPTConfig(vocabulary=13, length=6, layers=2, width=16, heads=2)
NAME = "blocks.1.mlp.up.weight"


def trained(kind, comm, **options):
    """Data parallelism after one step, and the moments of its optimizer."""
    model, dp = make(kind, CONFIG, comm, **options)
    optimizer = AdamW(dp)
    step(model, dp, optimizer, batch(CONFIG, 4, 1), 1)
    return model, dp, {"m": optimizer.m, "v": optimizer.v}


@pytest.mark.mpi(ranks=(1, 2, 4))
def test_replicas_that_trained_together_are_equal():
    comm = world()
    for kind in ("plain", "overlap", 1, 2, 3):
        _, dp, state = trained(kind, comm)
        check_replicas(1, dp.replicated(state))


@pytest.mark.mpi(ranks=(4,))
@pytest.mark.parametrize("kind", ("plain", 1, 2))
def test_one_changed_bit_names_tensor_rank_and_step(kind):
    comm = world()
    model, dp, state = trained(kind, comm)
    value = dict(model.named_parameters())[NAME].data
    if comm.rank == 2:
        value.reshape(-1).view(np.uint64)[5] ^= 1
    expected = rf"after step 7 value of {NAME} differs .* \[0, 1, 3\] and \[2\]"
    with pytest.raises(ReplicaError, match=expected):
        check_replicas(7, dp.replicated(state))


@pytest.mark.mpi(ranks=(4,))
@pytest.mark.parametrize("what", ("gradient", "m", "v"))
def test_gradients_and_moments_are_compared_too(what):
    comm = world()
    _, dp, state = trained("plain", comm)
    (piece,) = [p for p in dp.pieces() if p.parameter.name == NAME]
    array = piece.grad if what == "gradient" else state[what][piece.state]
    if comm.rank in (1, 3):
        array[0] += 1
    with pytest.raises(ReplicaError, match=rf"{what} of {NAME} differs .*\[0, 2\] and"):
        check_replicas(7, dp.replicated(state))


@pytest.mark.mpi(ranks=(4,))
@pytest.mark.parametrize("kind", (1, 2, 3))
def test_chunks_that_groups_of_ranks_replicate_are_compared(kind):
    comm = world()
    node, across = comm.Split(comm.rank // 2), comm.Split(comm.rank % 2)
    _, dp, state = trained(kind, node, replicas=across)
    check_replicas(1, dp.replicated(state))
    if comm.rank == 3 and dp.size:
        state["v"][0] += 1
    if comm.rank % 2 == 1:
        with pytest.raises(ReplicaError, match=r"v of \S+ differs .* \[0\] and \[1\]"):
            check_replicas(1, dp.replicated(state))
    else:
        check_replicas(1, dp.replicated(state))


def test_a_digest_depends_on_every_bit():
    x = np.arange(100.0)
    digests = {digest(x)}
    for i in range(x.view(np.uint8).size):
        y = x.copy()
        y.view(np.uint8)[i] ^= 128
        digests.add(digest(y))
    assert len(digests) == 801
