"""Layers to stages: none is lost, and weights of several stages are tied."""

import itertools

import numpy as np
import pytest

from mpiscale.errors import InputError
from mpiscale.models.gpt import GPT, GPTConfig
from mpiscale.nn.flat import materialize
from mpiscale.nn.layers import LayerNorm
from mpiscale.nn.placement import Placement
from mpiscale.parallel.pipeline_parallel.actions import Bidirectional, Loop, VShape
from mpiscale.parallel.pipeline_parallel.balance_stages import balanced_split
from mpiscale.parallel.pipeline_parallel.schedules import make_schedule
from mpiscale.parallel.pipeline_parallel.split_into_stages import (
    even_split,
    split_into_stages,
)
from mpiscale.parallel.tied_parameters import gradient_norm, synchronise
from mpiscale.train.config import TrainConfig
from mpiscale.train.split_blocks import measured_costs, split_blocks
from tests.communicators import world_communicator
from tests.parallel.pipeline_parallel.pipelined_twin import PipelinedTwin
from tests.parallel.replica_twin import FLOAT64, alone, batch


def test_even_splits_lose_no_layer():
    """B31: 30 layers on 4 stages are 30."""
    assert even_split(30, 4) == [8, 8, 7, 7]
    assert even_split(10, 3) == [4, 3, 3]
    for layers, stages in itertools.product(range(1, 41), range(1, 25)):
        if layers < stages:
            with pytest.raises(InputError, match=f"{layers} layers cannot fill"):
                even_split(layers, stages)
            continue
        split = even_split(layers, stages)
        assert sum(split) == layers and len(split) == stages
        assert max(split) - min(split) <= 1


def slowest(split, before, blocks, after):
    ends = itertools.accumulate(split)
    costs = [sum(blocks[end - n : end]) for n, end in zip(split, ends, strict=True)]
    costs[0] += before
    costs[-1] += after
    return max(costs)


@pytest.mark.parametrize("seed", range(20))
def test_balanced_splits_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    layers, stages = int(rng.integers(1, 8)), int(rng.integers(1, 5))
    before, after = rng.random(2) * 3
    blocks = rng.random(layers).tolist()
    if layers < stages - 2:
        with pytest.raises(InputError, match="cannot fill"):
            balanced_split(before, blocks, after, stages)
        return
    split = balanced_split(before, blocks, after, stages)
    assert sum(split) == layers and min(split[1:-1], default=1) >= 1
    every = itertools.product(range(layers + 1), repeat=stages)
    possible = [s for s in every if sum(s) == layers and min(s[1:-1], default=1) >= 1]
    best = min(slowest(s, before, blocks, after) for s in possible)
    assert slowest(split, before, blocks, after) == pytest.approx(best)


def test_a_heavy_head_gets_fewer_layers():
    assert balanced_split(0.0, [1.0] * 8, 3.0, 4)[-1] == 0
    assert balanced_split(1.0, [1.0] * 8, 0.0, 3) == [2, 3, 3]
    assert balanced_split(0.0, [1.0] * 6, 0.0, 3) == [2, 2, 2]


CONFIG = GPTConfig(vocabulary=11, length=4, layers=5, width=8, heads=2)


@pytest.mark.mpi(ranks=(1, 2, 3, 4))
def test_all_ranks_together_have_every_parameter_of_the_serial_model():
    comm = world_communicator()
    p = comm.size
    serial = GPT(CONFIG)
    values = materialize(serial, 1, FLOAT64)
    expected = {x.name: x.data for x in values.parameters}
    for stage_map in (Loop(p), VShape(p), Bidirectional(p, down=2)):
        if stage_map.stages > 5 + 2:
            continue
        model = GPT(CONFIG)
        inner = max(stage_map.stages - 2, 0)
        blocks = [5] if not inner and p == 1 and stage_map.stages == 1 else (
            [0, *[1] * inner, 5 - inner] if stage_map.stages > 1 else [5]
        )  # fmt: skip
        split_into_stages(model, stage_map, blocks, comm)
        flat = materialize(model, 1, FLOAT64)
        found = {}
        for names in comm.allgather({x.name: x.data.copy() for x in flat.parameters}):
            found |= names
        assert found.keys() == expected.keys()
        for name, data in expected.items():
            np.testing.assert_array_equal(found[name], data)


@pytest.mark.mpi(ranks=(2,))
def test_a_part_of_another_rank_is_named_when_it_is_used():
    comm = world_communicator()
    model = GPT(CONFIG)
    split_into_stages(model, Loop(2), [3, 2], comm)
    missing = "blocks.3" if comm.rank == 0 else "token_embedding"
    with pytest.raises(RuntimeError, match=f"{missing} is in a pipeline stage of anot"):
        model.loss(
            np.zeros((1, 4), int), np.zeros((1, 4), int), Placement.whole(1, 4)
        ) if comm.rank else model.blocks[3](None)


@pytest.mark.mpi(ranks=(2,))
def test_splits_that_lose_layers_are_refused_on_all_ranks():
    comm = world_communicator()
    for blocks, text in (
        ([2, 2], "holds 4 layers; expected 2 stages and 5 layers"),
        ([2, 2, 1], "over 3 stages"),
        ([6, -1], "may be without a layer"),
    ):
        with pytest.raises(InputError, match=text):
            split_into_stages(GPT(CONFIG), Loop(2), blocks, comm)
    with pytest.raises(InputError, match="only the first and the last stage"):
        split_into_stages(GPT(CONFIG), Loop(2, 2), [2, 0, 2, 1], comm)
    comm.Barrier()


@pytest.mark.mpi(ranks=(2,))
def test_a_part_that_no_stage_has_is_an_error():
    class Extra(GPT):
        def __init__(self, config):
            super().__init__(config)
            self.forgotten = LayerNorm(config.width)

    with pytest.raises(ValueError, match=r"forgotten.gain is in no pipeline stage"):
        split_into_stages(Extra(CONFIG), Loop(2), [3, 2], world_communicator())


@pytest.mark.mpi(ranks=(2, 4))
def test_tied_embeddings_sum_their_gradients_and_count_once():
    """B27: 2 + 5 = 7 on both stages; two copies of squares 800 are a norm of 28.28."""
    comm = world_communicator()
    p = comm.size
    twin = PipelinedTwin(CONFIG, make_schedule("1f1b", p, 2), comm)
    twin.dp.zero_grad()
    twin.dp.flat.grad[...] = 0
    twin.dp.flat.complete_grad()
    ends = comm.rank in (0, p - 1)
    tied = [x for x in twin.dp.parameters if x.name == "token_embedding.weight"]
    assert len(tied) == ends
    if ends:
        tied[0].grad[...] = 0
        tied[0].grad[3, 0] = 2.0 if comm.rank == 0 else 5.0
    synchronise(twin.dp.pieces())
    if ends:
        assert tied[0].grad[3, 0] == 7.0
        tied[0].grad[3, :2] = 20.0  # squares: 800
    assert gradient_norm(twin.dp.pieces(), comm) == pytest.approx(28.2843, abs=1e-4)


@pytest.mark.mpi(ranks=(2, 4))
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v", "dualpipe", "dualpipe_v"])
def test_copies_stay_equal_to_the_bit_over_ten_steps(name):
    comm = world_communicator()
    config = GPTConfig(vocabulary=11, length=4, layers=8, width=8, heads=2)
    twin = PipelinedTwin(config, make_schedule(name, comm.size, 4), comm)
    for k in range(1, 11):
        twin.step(batch(config, 4, k), k)
    twin.whole("data")  # compares all copies
    holders = comm.allreduce(
        sum(x.name == "token_embedding.weight" for x in twin.dp.parameters)
    )
    assert holders == (1 if name in ("zb_v", "dualpipe_v") else 2)


def test_measured_costs_split_the_layers():
    config = TrainConfig(layers=3, width=16, heads=2, length=8, batch=2, vocab=4000)
    before, block, after = measured_costs(config, 2)
    assert min(before, block, after) > 0
    comm = alone()
    split = split_blocks(comm, config, "balanced", 2, 2)
    assert sum(split) == 3 and len(split) == 2
    assert split_blocks(comm, config, "even", 2, 2) == [2, 1]
    assert split_blocks(comm, config, "1,2", 2, 2) == [1, 2]
    with pytest.raises(InputError, match=r"--split '1;2': expected even, balanced"):
        split_blocks(comm, config, "1;2", 2, 2)
