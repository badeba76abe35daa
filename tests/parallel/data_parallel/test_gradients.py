"""Faults that gradients of replicas are prone to, in every form of data parallelism."""

import time
from itertools import pairwise

import numpy as np
import pytest

from mpiscale.backend import BFLOAT16, FLOAT32, FLOAT64
from mpiscale.comm.algorithms.ring_all_gather import ring_all_gather
from mpiscale.comm.algorithms.ring_all_reduce import ring_all_reduce
from mpiscale.comm.algorithms.ring_reduce_scatter import ring_reduce_scatter
from mpiscale.comm.chosen_algorithms import Algorithms, with_algorithms
from mpiscale.nn.flat import materialize
from mpiscale.nn.layers import Linear
from mpiscale.nn.module import Module
from mpiscale.nn.parameter import Constant
from mpiscale.optim.adamw import AdamW
from mpiscale.optim.sgd import SGD
from mpiscale.parallel.data_parallel.all_reduce_after_backward import (
    AllReduceAfterBackward,
)
from mpiscale.parallel.data_parallel.bucketed_overlap import (
    BucketedOverlap,
    cut_into_buckets,
)
from mpiscale.parallel.tied_parameters import gradient_norm
from mpiscale.tensor import Tensor
from tests.parallel.replica_twin import STAGES, alone, whole, world

KINDS = ("plain", "overlap", 1, 2, 3)
# MPI's own may copy what it reduces when it starts; these send from the array itself.
LATE_READING = Algorithms(
    all_reduce=lambda comm: ring_all_reduce,
    reduce_scatter=lambda comm: ring_reduce_scatter,
    all_gather=lambda comm: ring_all_gather,
)
every_kind = pytest.mark.parametrize("kind", KINDS)


class Rows(Module):
    """Layers a, b, c, ... each a weight [1, n], of which a call uses some.

    y = the sum of the used rows, so that dy is the gradient of each.
    """

    def __init__(self, *lengths):
        self.layers = [Linear(1, (n,), Constant(0.0), bias=False) for n in lengths]

    def forward(self, used, dtype=FLOAT64):
        one = Tensor(np.ones((1, 1), dtype))
        return [self.layers[i](one) for i in used]


def make(kind, model, comm, dtype=FLOAT64):
    if kind in STAGES:
        return STAGES[kind](model, comm, 1, dtype)
    flat = materialize(model, 1, dtype)
    if kind == "plain":
        return AllReduceAfterBackward(flat, comm)
    return BucketedOverlap(flat, comm, bucket_bytes=1)


def backward(model, gradients, dtype=FLOAT64):
    """One backward pass that gives layer i the gradient gradients[i]."""
    for y, grad in zip(model(list(gradients), dtype), gradients.values(), strict=True):
        y.backward(np.array([grad], dtype))


@every_kind
@pytest.mark.mpi(ranks=(2,))
def test_ranks_weigh_by_their_tokens_not_alike(kind):
    comm = world()  # rank 0: 5 tokens of gradient 1 each; rank 1: 1 token, gradient 7
    model = Rows(1)
    dp = make(kind, model, comm)
    dp.zero_grad()
    backward(model, {0: [(5 * 1 if comm.rank == 0 else 7) / 6]})
    dp.finish()
    assert whole(dp, "grad")["layers.0.weight"] == 2.0


@every_kind
@pytest.mark.mpi(ranks=(1, 2))
def test_micro_batches_are_summed_over_one_number_of_tokens(kind):
    model = Rows(1)  # 1 token of gradient sum 4, then 9 tokens of gradient sum 9
    dp = make(kind, model, world())
    dp.zero_grad()
    with dp.no_sync():
        backward(model, {0: [4 / 10 / dp.comm.size]})
    backward(model, {0: [9 / 10 / dp.comm.size]})
    dp.finish()
    np.testing.assert_allclose(whole(dp, "grad")["layers.0.weight"], 1.3, rtol=1e-15)


@every_kind
@pytest.mark.mpi(ranks=(2,))
def test_a_parameter_used_on_one_rank_only_is_reduced_everywhere(kind):
    comm, model = world(), Rows(2, 3, 4)
    dp = make(kind, model, comm)
    for _ in range(2):
        dp.zero_grad()
        # ZeRO-3 needs every rank's call; a zero gradient is then as good as none.
        unused = {1: [0.0] * 3} if kind == 3 else {}
        other = unused if comm.rank == 0 else {1: [6.0] * 3}
        backward(model, {0: [1.0, 1.0]} | other)
        dp.finish()
        grads = whole(dp, "grad")
        assert grads["layers.0.weight"].tolist() == [2.0, 2.0]
        assert grads["layers.1.weight"].tolist() == [6.0, 6.0, 6.0]
        assert grads["layers.2.weight"].tolist() == [0.0] * 4
        SGD(dp).step(0.5)
        dp.publish()
    assert whole(dp, "data")["layers.1.weight"].tolist() == [-6.0] * 3


@every_kind
@pytest.mark.mpi(ranks=(2,))
def test_gradients_that_become_ready_in_another_order_are_not_mixed_up(kind):
    comm, model = world(), Rows(2, 2)
    dp = make(kind, model, comm)
    dp.zero_grad()
    y = model([0, 1])
    order = (0, 1) if comm.rank == 0 or kind == 3 else (1, 0)
    for i in order:
        y[i].backward(np.full((1, 2), (1.0, 10.0)[i]))
    dp.finish()
    grads = whole(dp, "grad")
    assert grads["layers.0.weight"].tolist() == [2.0, 2.0]
    assert grads["layers.1.weight"].tolist() == [20.0, 20.0]


@every_kind
@pytest.mark.mpi(ranks=(1, 2, 4, 8))
def test_three_elements_on_more_ranks_train_as_on_one(kind):
    results = []
    for comm in (alone(), world()):
        model = Rows(3)
        dp = make(kind, model, comm)
        optimizer = AdamW(dp)
        for _ in range(2):
            dp.zero_grad()
            backward(model, {0: np.array([1.0, 2.0, 3.0]) / comm.size})
            dp.finish()
            optimizer.step(0.1)
            dp.publish()
        results.append(whole(dp, "data")["layers.0.weight"])
        chunk = 3 if kind not in STAGES else -(-3 // comm.size)
        first = 0 if kind not in STAGES else comm.rank * chunk
        assert dp.size == len(range(3)[first : first + chunk])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-14)


@every_kind
@pytest.mark.mpi(ranks=(1, 2))
def test_no_micro_batch_is_lost(kind):
    model = Rows(1)
    dp = make(kind, model, world())
    dp.zero_grad()
    for i, gradient in enumerate((1.0, 10.0, 100.0)):
        scaled = {0: [gradient / 3 / dp.comm.size]}
        if i < 2:
            with dp.no_sync():
                backward(model, scaled)
        else:
            backward(model, scaled)
    dp.finish()
    np.testing.assert_allclose(whole(dp, "grad")["layers.0.weight"], 37.0, rtol=1e-15)


@every_kind
@pytest.mark.mpi(ranks=(2,))
@pytest.mark.parametrize("algorithms", (Algorithms(), LATE_READING))
def test_a_bucket_is_not_used_again_before_its_reduction_ends(kind, algorithms):
    n, comm = 1 << 18, with_algorithms(world(), algorithms)
    model = Rows(n, n, n, n)
    dp = make(kind, model, comm, FLOAT32)
    for _ in range(2):
        dp.zero_grad()
        for k, y in reversed(list(enumerate(model(range(4), FLOAT32)))):
            time.sleep(0.05 * comm.rank)
            value = (k + 1) * (1 if comm.rank == 0 else 3) / 2
            y.backward(np.full((1, n), value, np.float32))
        dp.finish()
        grads = whole(dp, "grad")
        for k in range(4):
            assert (grads[f"layers.{k}.weight"] == 2 * (k + 1)).all()
        dp.publish()


@every_kind
@pytest.mark.mpi(ranks=(1, 2))
def test_small_terms_survive_in_sums_of_bfloat16_gradients(kind):
    model = Rows(1)
    dp = make(kind, model, world(), BFLOAT16)
    dp.zero_grad()
    with dp.no_sync():
        backward(model, {0: [1.0 / dp.comm.size]}, BFLOAT16)
    for _ in range(511):
        with dp.no_sync():
            backward(model, {0: [2.0**-9 / dp.comm.size]}, BFLOAT16)
    backward(model, {0: [2.0**-9 / dp.comm.size]}, BFLOAT16)
    dp.finish()
    assert whole(dp, "grad")["layers.0.weight"] == 2.0


@every_kind
@pytest.mark.mpi(ranks=(2,))
def test_accumulation_sends_gradients_once_where_they_are_held_whole(kind):
    n, comm, micro_batches = 1_000_000, world(), 8
    model = Rows(n)
    dp = make(kind, model, comm, FLOAT32)
    dp.zero_grad()
    before = comm.ledger.sent_bytes()
    for i in range(micro_batches):
        if i < micro_batches - 1:
            with dp.no_sync():
                backward(model, {0: np.ones(n)}, FLOAT32)
        else:
            backward(model, {0: np.ones(n)}, FLOAT32)
    dp.finish()
    sent = comm.ledger.sent_bytes() - before
    halves = {"plain": 2, "overlap": 2, 1: 1, 2: micro_batches}
    if kind == 3:  # two gathers and a reduce-scatter each, and agreements
        agreements = 3 * micro_batches * 8
        assert sent == 3 * micro_batches * 2_000_000 + agreements
    else:
        assert sent == halves[kind] * 2_000_000
    assert (whole(dp, "grad")["layers.0.weight"] == 16.0).all()


@every_kind
@pytest.mark.mpi(ranks=(4,))
def test_an_infinite_gradient_on_one_rank_is_seen_by_all(kind):
    comm, model = world(), Rows(5)
    dp = make(kind, model, comm)
    dp.zero_grad()
    backward(
        model, {0: [np.inf if comm.rank == 2 and i == 3 else 1.0 for i in range(5)]}
    )
    dp.finish()
    assert not np.isfinite(gradient_norm(dp.pieces(), *dp.shard_groups))


@every_kind
@pytest.mark.mpi(ranks=(3,))
def test_the_norm_counts_every_element_once(kind):
    model = Rows(4, 1, 7)
    dp = make(kind, model, world())
    dp.zero_grad()
    backward(model, {0: [1.0] * 4, 1: [2.0], 2: [3.0] * 7})
    dp.finish()
    norm = gradient_norm(dp.pieces(), *dp.shard_groups)
    np.testing.assert_allclose(norm, 3 * np.sqrt(4 + 4 + 63), rtol=1e-15)


@pytest.mark.mpi(ranks=(2,))
def test_a_second_backward_without_no_sync_is_refused():
    model = Rows(2)
    dp = make("overlap", model, world())
    dp.zero_grad()
    backward(model, {0: [1.0, 1.0]})
    with pytest.raises(RuntimeError, match=r"'layers.0.weight'.*inside\s+no_sync"):
        backward(model, {0: [1.0, 1.0]})
    dp.finish()


def test_buckets_cover_the_flat_arrays_in_the_order_of_backward():
    model = Rows(5, 3, 2, 9)
    flat = materialize(model, 1, FLOAT32)
    for limit, names in (
        (1, [[3], [2], [1], [0]]),
        (20, [[3], [2, 1], [0]]),
        (999, [[3, 2, 1, 0]]),
    ):
        buckets = cut_into_buckets(flat, limit)
        expected = [[f"layers.{i}.weight" for i in bucket] for bucket in names]
        assert [[p.name for p in b.parameters] for b in buckets] == expected
        covered = sorted((b.place.start, b.place.stop) for b in buckets)
        assert covered[0][0] == 0 and covered[-1][1] == flat.size
        assert all(a[1] == b[0] for a, b in pairwise(covered))
    with pytest.raises(ValueError, match="positive, got 0"):
        cut_into_buckets(flat, 0)
