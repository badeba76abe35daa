"""Every form of data parallelism trains as the serial run of the same global batch."""

from typing import Any

import pytest

from mpiscale.models.gpt import GPTConfig
from mpiscale.models.llama import LlamaConfig
from tests.parallel.replica_twin import alone, assert_equal_runs, train, world

KINDS = ("plain", "overlap", "gathered lookups", 1, 2, 3)
SIZES: dict[str, Any] = dict(vocabulary=13, length=6, layers=2, width=16, heads=2)
MODELS = {
    "gpt tied, dropout": GPTConfig(**SIZES, dropout=0.1),
    "llama untied": LlamaConfig(**SIZES, hidden=24, tied=False),
}


@pytest.mark.mpi(ranks=(1, 2, 3, 4, 8))
@pytest.mark.parametrize("accumulate", (1, 3))
@pytest.mark.parametrize("model", MODELS)
def test_five_steps_equal_the_serial_run(model, accumulate):
    comm = world()
    samples = 3 * comm.size + 1  # uneven: one rank has a sample more
    serial = train("plain", MODELS[model], alone(), samples)
    for kind in KINDS:
        parallel = train(kind, MODELS[model], comm, samples, accumulate=accumulate)
        assert_equal_runs(parallel, serial)


@pytest.mark.mpi(ranks=(4,))
def test_ranks_and_micro_batches_without_a_sample_take_part():
    config = MODELS["gpt tied, dropout"]
    serial = train("plain", config, alone(), samples=2)
    for kind in KINDS:
        parallel = train(kind, config, world(), samples=2, accumulate=3)
        assert_equal_runs(parallel, serial)
