"""DiLoCo against its algorithm carried out on one rank, replica after replica."""

import numpy as np
import pytest

from mpiscale.data.batches import IGNORE, Batch
from mpiscale.models.gpt import GPT, GPTConfig
from mpiscale.nn.flat import materialize
from mpiscale.nn.placement import Placement
from mpiscale.optim.adamw import AdamW
from mpiscale.parallel.data_parallel.diloco import DiLoCo
from mpiscale.parallel.data_parallel.traffic import diloco_traffic
from tests.parallel.replica_twin import FLOAT64, batch, world

CONFIG = GPTConfig(vocabulary=13, length=6, layers=1, width=16, heads=2)
EVERY, ROUNDS, OUTER_LR, MOMENTUM = 3, 3, 0.7, 0.9


def global_batch(samples, k):
    tokens, labels = batch(CONFIG, samples, k)
    n = np.arange(samples)
    valid = int((labels != IGNORE).sum())
    return Batch(tokens, labels, n, np.arange(6), tokens * 0, valid, k)


def local_step(model, flat, optimizer, mine):
    flat.zero_grad()
    placement = Placement(mine.samples, mine.positions, 6)
    model.loss(mine.tokens, mine.labels, placement, mine.valid).backward()
    optimizer.step(1e-2)


def by_the_paper(replicas, samples):
    """Algorithm 1 of Douillard et al. (2023), with plain arrays."""
    models = []
    for _ in range(replicas):
        model = GPT(CONFIG)
        flat = materialize(model, 1, FLOAT64)
        models.append((model, flat, AdamW(flat, eps=1e-7)))
    start = models[0][1].data.copy()
    velocity = np.zeros_like(start)
    for k in range(EVERY * ROUNDS):
        for rank, (model, flat, optimizer) in enumerate(models):
            mine = global_batch(samples, k).part(rank, replicas)
            mine = mine.with_valid(int((mine.labels != IGNORE).sum()))
            local_step(model, flat, optimizer, mine)
        if (k + 1) % EVERY == 0:
            delta = sum(start - flat.data for _, flat, _ in models) / replicas
            velocity = MOMENTUM * velocity + delta
            start = start - OUTER_LR * (delta + MOMENTUM * velocity)
            for _, flat, _ in models:
                flat.data[...] = start
    return start


@pytest.mark.mpi(ranks=(1, 2, 3, 4))
def test_three_rounds_equal_the_algorithm():
    comm = world()
    samples = 2 * comm.size + 1
    model = GPT(CONFIG)
    flat = materialize(model, 1, FLOAT64)
    dp = DiLoCo(flat, comm, EVERY, OUTER_LR, MOMENTUM)
    optimizer = AdamW(dp, eps=1e-7)
    for k in range(EVERY * ROUNDS):
        before = comm.ledger.sent_bytes()
        local_step(model, flat, optimizer, dp.share(global_batch(samples, k)))
        dp.finish()
        dp.publish()
        sent = comm.ledger.sent_bytes() - before
        assert (sent > 0) == (comm.size > 1 and (k + 1) % EVERY == 0)
        if (k + 1) % EVERY == 0:
            traffic = diloco_traffic(dp.size, 8, EVERY, comm)
            assert traffic.sent_bytes == round(sent / EVERY)
    expected = by_the_paper(comm.size, samples)
    np.testing.assert_allclose(flat.data, expected, rtol=1e-12, atol=1e-12)
    assert comm.ledger.sent_bytes() > 0 or comm.size == 1


def test_no_round_can_have_no_steps():
    flat = materialize(GPT(CONFIG), 1, FLOAT64)
    with pytest.raises(ValueError, match="at least 1 step, got 0"):
        DiLoCo(flat, world(), 0)
