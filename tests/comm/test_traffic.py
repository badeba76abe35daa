"""The closed formulas of traffic: by hand, and summed over the ranks."""

import numpy as np
import pytest

from mpiscale.comm import traffic


def test_chunks_are_those_of_array_split():
    for n in (0, 1, 5, 12, 17):
        for p in (1, 2, 3, 5):
            chunks = np.array_split(np.arange(n), p)
            lengths = [traffic.chunk_length(n, p, i) for i in range(p)]
            assert lengths == [chunk.size for chunk in chunks]


def test_all_reduce_of_10_elements_on_4_ranks():
    # chunks 3 3 2 2; rank 0 sends all but chunk 0, then all but chunk 1: 7 + 7
    sent = [traffic.all_reduce_sent(10, 4, rank) for rank in range(4)]
    assert sent == [14, 15, 16, 15]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_every_collective_sends_p_minus_1_times_its_array_in_all(p):
    n, ranks = 24, range(p)
    blocks = [n // p] * p
    by_operation = {
        "reduce-scatter": [traffic.reduce_scatter_sent(n // p, p) for _ in ranks],
        "all-gather": [traffic.all_gather_sent(blocks, r) for r in ranks],
        "all-to-all": [traffic.all_to_all_sent(blocks, r) for r in ranks],
        "broadcast": [traffic.broadcast_sent(n, p, r, root=p - 1) for r in ranks],
        "reduce": [traffic.reduce_sent(n, r, root=0) for r in ranks],
    }
    for operation, sent in by_operation.items():
        assert sum(sent) == (p - 1) * n, operation
    assert sum(traffic.all_reduce_sent(n, p, r) for r in ranks) == 2 * (p - 1) * n


def test_uneven_blocks():
    assert traffic.all_gather_sent([5, 0, 2], rank=2) == 2  # all but block 0
    assert traffic.all_to_all_sent([5, 0, 2], rank=0) == 2  # all but its own


def test_last_rank_of_the_broadcast_chain_sends_nothing():
    assert [traffic.broadcast_sent(7, 3, r, root=1) for r in range(3)] == [0, 7, 7]
    assert [traffic.reduce_sent(7, r, root=1) for r in range(3)] == [7, 0, 7]
