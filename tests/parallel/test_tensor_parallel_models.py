"""A model cut over ranks trains as the serial one: losses, gradients, parameters."""

from typing import Any

import numpy as np
import pytest

from mpiscale.errors import InputError
from mpiscale.models.gpt import GPT, GPTConfig
from mpiscale.models.llama import Llama, LlamaConfig
from mpiscale.optim.adamw import AdamW
from mpiscale.parallel.sharding import gather_whole
from mpiscale.parallel.tensor_parallel.tensor_parallelize import tensor_parallelize
from mpiscale.parallel.tensor_parallel.traffic import step_traffic
from mpiscale.parallel.tied_parameters import Tie, gradient_norm, synchronise
from tests.parallel.serial_twin import (
    FLOAT64,
    alone,
    assert_equal_runs,
    batch,
    make,
    step,
    train,
    world,
)

GPT_SIZES: dict[str, Any] = dict(vocabulary=37, length=10, layers=2, width=32, heads=8)
LLAMA_SIZES = GPT_SIZES | {"hidden": 48}
CASES = {
    "gpt tied": GPTConfig(**GPT_SIZES),
    "gpt untied, dropout, smoothing": GPTConfig(
        **GPT_SIZES, tied=False, dropout=0.2, label_smoothing=0.1
    ),
    "gpt with one key/value head": GPTConfig(**GPT_SIZES, kv_heads=1),
    "llama with two key/value heads": LlamaConfig(**LLAMA_SIZES, kv_heads=2),
    "llama tied, all heads": LlamaConfig(**LLAMA_SIZES, kv_heads=None, tied=True),
}


@pytest.mark.mpi(ranks=(1, 2, 4, 8))
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_equal_the_serial_run(case):
    config = CASES[case]
    serial = train(config, alone(), steps=20, tensor_parallel=False)
    assert_equal_runs(train(config, world(), steps=20), serial)


@pytest.mark.mpi(ranks=(3,))
def test_three_ranks_with_a_padded_vocabulary_equal_the_serial_run():
    config = GPTConfig(vocabulary=37, length=10, layers=2, width=24, heads=6)
    serial = train(config, alone(), steps=5, tensor_parallel=False)
    assert_equal_runs(train(config, world(), steps=5), serial)


@pytest.mark.mpi(ranks=(4,))
def test_messages_above_the_eager_limit_equal_the_serial_run():
    config = GPTConfig(vocabulary=256, length=128, layers=1, width=128, heads=4)
    serial = train(config, alone(), steps=2, tensor_parallel=False)
    assert_equal_runs(train(config, world(), steps=2), serial)


@pytest.mark.mpi(ranks=(1, 2, 4, 8))
def test_every_fitting_number_of_heads_equals_the_serial_run():
    comm = world()
    p = comm.size
    for heads in (h for h in range(p, 9) if h % p == 0):
        for kv in (n for n in range(1, heads + 1) if heads % n == 0):
            if kv % p and p % kv:
                continue
            config = GPTConfig(
                vocabulary=11, length=5, layers=1, width=4 * heads, heads=heads,
                kv_heads=kv,
            )  # fmt: skip
            serial = train(config, alone(), steps=1, tensor_parallel=False)
            assert_equal_runs(train(config, comm, steps=1), serial)


@pytest.mark.mpi(ranks=(4,))
def test_replicated_key_value_heads_sum_their_gradients_in_their_own_group():
    comm = world()
    config = GPTConfig(vocabulary=8, length=4, layers=1, width=8, heads=4, kv_heads=2)
    model, flat = make(config, comm)
    flat.grad[...] = 0
    flat.complete_grad()
    qkv = model.blocks[0].attention.qkv
    for parameter in (qkv.weight, qkv.bias):
        parameter.grad[...] = [1.0, 2.0, 10.0, 20.0][comm.rank]
    synchronise(flat.pieces())
    total = [3.0, 3.0, 30.0, 30.0][comm.rank]
    own = [1.0, 2.0, 10.0, 20.0][comm.rank]
    q = config.width // comm.size  # own query columns are not shared
    np.testing.assert_array_equal(qkv.bias.grad[q:], total)
    np.testing.assert_array_equal(qkv.bias.grad[:q], own)
    np.testing.assert_array_equal(qkv.weight.grad[:, q:], total)


@pytest.mark.mpi(ranks=(8,))
def test_replicas_stay_bit_equal():
    comm = world()
    config = GPTConfig(vocabulary=16, length=8, layers=2, width=32, heads=8, kv_heads=2)
    model, flat = make(config, comm)
    optimizer = AdamW(flat)
    for k in range(1, 4):
        step(model, flat, optimizer, batch(config, seed=k), comm, k)
    for parameter in flat.parameters:
        for tie in parameter.ties:
            values = np.ascontiguousarray(parameter.data[tie.region]).tobytes()
            assert len(set(tie.comm.allgather(values))) == 1, parameter.name


@pytest.mark.mpi(ranks=(2,))
def test_the_norm_counts_replicated_parameters_once():
    comm = world()
    model, flat = make(
        GPTConfig(vocabulary=8, length=4, layers=1, width=8, heads=2), comm
    )
    flat.grad[...] = 0
    flat.complete_grad()
    up = model.blocks[0].mlp.up.weight.grad
    up[0, 0] = [3.0, 4.0][comm.rank]
    model.final_norm.gain.grad[0] = 12.0
    assert gradient_norm(flat.pieces(), comm) == 13.0


@pytest.mark.mpi(ranks=(1, 2, 4, 8))
def test_first_values_are_the_same_on_every_layout():
    comm = world()
    for config in CASES.values():
        serial, _ = make(config)
        cut, _ = make(config, comm)
        expected = serial.state_dict()
        for parameter in cut.parameters():
            whole = gather_whole(parameter, parameter.data, comm)
            np.testing.assert_array_equal(whole, expected[parameter.name])
        if comm.size > 1:
            weight = cut.blocks[0].mlp.up.weight
            parts = comm.allgather(weight.data.tobytes())
            assert len(set(parts)) == comm.size


@pytest.mark.mpi(ranks=(1, 2, 3, 4, 8))
def test_the_ledger_equals_the_traffic_formula_to_the_byte():
    comm = world()
    width = 24 if comm.size == 3 else 32
    heads = 6 if comm.size == 3 else 8
    for kv, smoothing, dtype in ((heads, 0.0, FLOAT64), (1, 0.1, np.dtype("float32"))):
        config = GPTConfig(
            vocabulary=37,
            length=7,
            layers=2,
            width=width,
            heads=heads,
            kv_heads=kv,
            label_smoothing=smoothing,
        )
        model, flat = make(config, comm, dtype=dtype)
        data = batch(config, batch=3)
        formula = step_traffic(
            flat.parameters, config.layers, config.width, 3 * 7, smoothing, dtype, comm
        )
        before = comm.ledger.sent_bytes()
        step(model, flat, AdamW(flat), data, comm)
        assert comm.ledger.sent_bytes() - before == formula.sent_bytes
        assert (formula.sent_bytes > 0) == (comm.size > 1)


@pytest.mark.mpi(ranks=(4,))
def test_what_cannot_be_cut_is_refused_on_all_ranks():
    comm = world()
    with pytest.raises(InputError, match=r"attention heads \(length 6\) into 4 equal"):
        tensor_parallelize(GPT(GPTConfig(width=48, heads=6)), comm)
    with pytest.raises(
        InputError, match=r"3 key/value heads over 4 ranks: 4 = 1 x 3 \+ 1"
    ):
        tensor_parallelize(GPT(GPTConfig(width=48, heads=12, kv_heads=3)), comm)
    with pytest.raises(InputError, match="output features"):
        tensor_parallelize(
            Llama(LlamaConfig(width=32, heads=4, kv_heads=4, hidden=30)), comm
        )
    comm.Barrier()


def test_a_table_that_names_nothing_is_refused():
    class Typo(GPT):
        TENSOR_PARALLEL = {**GPT.TENSOR_PARALLEL, "blocks.*.attn": "heads"}  # noqa: RUF012

    with pytest.raises(ValueError, match=r"blocks.*attn.* matches nothing"):
        tensor_parallelize(Typo(GPTConfig()), alone())
    assert Tie(alone(), "same").counts_here
