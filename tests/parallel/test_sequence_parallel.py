"""Sequences cut inside a tensor-parallel group: the serial run in 1 / p of memory."""

from typing import Any

import numpy as np
import pytest

from mpiscale.models.gpt import GPT, GPTConfig
from mpiscale.models.llama import LlamaConfig
from mpiscale.nn.placement import Noise, Placement
from mpiscale.optim.adamw import AdamW
from mpiscale.parallel.async_tensor_parallel import (
    AsyncSequenceBoundary,
    around_the_ring,
    reduce_scatter_around_the_ring,
)
from mpiscale.parallel.sequence_parallel import (
    SequenceBoundary,
    gather_tokens,
    scatter_sum_of_tokens,
    sequence_parallelize,
)
from mpiscale.parallel.tensor_parallel.traffic import sequence_step_traffic
from mpiscale.parallel.tied_parameters import gradient_norm, synchronise
from mpiscale.rng import stream_key
from mpiscale.tensor import Tensor
from mpiscale.train.memory import saved_bytes
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

BOUNDARIES = [SequenceBoundary, AsyncSequenceBoundary]
SIZES: dict[str, Any] = dict(vocabulary=37, layers=2, width=48, heads=24)
CASES = {
    "gpt tied": GPTConfig(**SIZES, length=11),
    "gpt untied, dropout, smoothing": GPTConfig(
        **SIZES, length=12, tied=False, dropout=0.2, label_smoothing=0.1
    ),
    "gpt with one key/value head": GPTConfig(**SIZES, length=9, kv_heads=1),
    "llama with grouped heads": LlamaConfig(**SIZES, length=10, kv_heads=12, hidden=48),
}

both = pytest.mark.parametrize("boundary", BOUNDARIES)


@both
@pytest.mark.mpi(ranks=(1, 2, 3, 4, 8))
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_equal_the_serial_run(case, boundary):
    config, comm = CASES[case], world()
    if case == "llama with grouped heads" and comm.size == 8:
        config = LlamaConfig(**SIZES, length=10, kv_heads=8, hidden=48)
    serial = train(config, alone(), steps=10, tensor_parallel=False)
    assert_equal_runs(train(config, comm, steps=10, boundary=boundary), serial)


@both
@pytest.mark.mpi(ranks=(2, 3, 4))
def test_every_length_equals_the_serial_run(boundary):
    """Also lengths that the ranks do not divide, and fewer tokens than ranks."""
    comm = world()
    for length in range(1, 34):
        config = GPTConfig(vocabulary=11, length=length, layers=1, width=12, heads=12)
        serial = train(config, alone(), steps=2, tensor_parallel=False)
        assert_equal_runs(train(config, comm, steps=2, boundary=boundary), serial)


@both
@pytest.mark.mpi(ranks=(4,))
def test_messages_above_the_eager_limit_equal_the_serial_run(boundary):
    comm = world()
    config = GPTConfig(vocabulary=256, length=128, layers=1, width=128, heads=4)
    serial = train(config, alone(), steps=2, tensor_parallel=False)
    assert_equal_runs(train(config, comm, steps=2, boundary=boundary), serial)


@both
@pytest.mark.mpi(ranks=(1, 2, 3, 4, 8))
def test_the_ledger_equals_the_traffic_formula_to_the_byte(boundary):
    comm = world()
    for length, smoothing, dtype in ((7, 0.0, FLOAT64), (12, 0.1, np.dtype("float32"))):
        config = GPTConfig(
            vocabulary=37, length=length, layers=2, width=48, heads=24, kv_heads=24,
            label_smoothing=smoothing,
        )  # fmt: skip
        model, flat = make(config, comm, dtype=dtype, boundary=boundary)
        formula = sequence_step_traffic(
            flat.parameters, 2, 48, 3, length, smoothing, dtype, comm
        )
        before = comm.ledger.sent_bytes()
        step(model, flat, AdamW(flat), batch(config, batch=3), comm)
        assert comm.ledger.sent_bytes() - before == formula.sent_bytes
        assert (formula.sent_bytes > 0) == (comm.size > 1)


@both
@pytest.mark.mpi(ranks=(2, 4))
def test_forward_sends_the_published_volume(boundary):
    """4 N h elements a layer: 2 all-gathers, 2 reduce-scatters; (p - 1) / p of each."""
    comm = world()
    sent = []
    for layers in (1, 2):
        config = GPTConfig(vocabulary=37, length=8, layers=layers, width=48, heads=24)
        model, _ = make(config, comm, boundary=boundary)
        tokens, labels = batch(config, batch=3)
        before = comm.ledger.sent_bytes()
        model.loss(tokens, labels, Placement.whole(*tokens.shape))
        sent.append(comm.ledger.sent_bytes() - before)
    elements = (sent[1] - sent[0]) / 8
    assert elements == 4 * 3 * 8 * 48 * (comm.size - 1) / comm.size


@both
@pytest.mark.mpi(ranks=(1, 2, 4))
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_keeps_the_serial_bytes_over_p(boundary, dropout):
    """s b h (34 + 5 a s / h) / t for the layers here: 1 / p of the serial bytes."""
    comm = world()
    kept = {}
    for cut in (False, True):
        for layers in (1, 3):
            config = GPTConfig(
                vocabulary=37, length=16, layers=layers, width=32, heads=8,
                dropout=dropout,
            )  # fmt: skip
            model, flat = make(
                config, comm if cut else None, boundary=boundary if cut else None
            )
            tokens, labels = batch(config, batch=2)
            placement = Placement.whole(*tokens.shape, Noise(1, 1))
            loss = model.loss(tokens, labels, placement)
            kept[cut, layers] = saved_bytes([loss], (flat.data, flat.grad))
    features = 2 * 2 * 8 * 32 if dropout else 0  # column indices of two dropouts
    serial = kept[False, 3] - kept[False, 1] - features
    mine = kept[True, 3] - kept[True, 1] - features
    assert mine == serial / comm.size


@both
@pytest.mark.mpi(ranks=(2, 4))
def test_gradients_of_whole_parameters_are_sums_and_then_equal(boundary):
    """B25: norms, row biases and positions see a part of the tokens."""
    comm = world()
    config = CASES["gpt tied"]
    model, flat = make(config, comm, boundary=boundary)
    whole = [p for p in flat.parameters if p.shard is None]
    names = {p.name for p in whole}
    assert {"final_norm.gain", "blocks.0.attention.out.bias"} < names
    assert "position_embedding.weight" in names
    flat.grad[...] = 0
    flat.complete_grad()
    model.final_norm.gain.grad[...] = [1.5, 2.5, 0.0, 0.0][comm.rank]
    synchronise(flat.pieces())
    assert (model.final_norm.gain.grad == 4.0).all()
    assert gradient_norm(flat.pieces(), comm) == pytest.approx(4 * np.sqrt(48))
    step(model, flat, AdamW(flat), batch(config), comm)
    for parameter in whole:
        for what in (parameter.grad, parameter.data):
            assert len(set(comm.allgather(what.tobytes()))) == 1, parameter.name


@pytest.mark.mpi(ranks=(2,))
def test_dropout_masks_are_parts_of_one_mask():
    """B26: equal where activations are replicated, independent where they are cut."""
    comm = world()
    shape = {"vocabulary": 8, "length": 64, "layers": 1, "width": 64, "heads": 2}
    config = GPTConfig(**shape, dropout=0.5)
    masks = {}
    for boundary in (None, SequenceBoundary):
        model, _ = make(config, comm, boundary=boundary)
        tokens = np.zeros((1, 64), np.int64)
        placement = Placement.whole(1, 64, Noise(1, 1))
        placed = model.arrange(tokens, placement, None).placement
        ones = Tensor(np.ones((1, len(placed.resident_positions), 64)))
        ones = model.dropout(ones, placed).data
        masks[boundary] = comm.allgather(ones.tolist())
    replicated = np.array(masks[None]) > 0
    assert (replicated[0] == replicated[1]).all()
    cut = np.array(masks[SequenceBoundary]) > 0
    np.testing.assert_array_equal(np.concatenate(cut, axis=1), replicated[0])
    assert abs((cut[0] == cut[1]).mean() - 0.5) < 0.05
    assert stream_key(1, "dropout", "embedding", 1) != stream_key(
        1, "dropout", "embedding", 2
    )


@pytest.mark.mpi(ranks=(1, 2, 3, 4))
def test_rings_are_the_collectives():
    comm = world()
    p, rank = comm.size, comm.rank
    rng = np.random.default_rng(rank)
    own = rng.normal(size=(2, 3, 5))
    everyones = gather_tokens(own, comm)
    assert everyones.shape == (2, 3 * p, 5)
    np.testing.assert_array_equal(everyones[:, 3 * rank : 3 * rank + 3], own)
    seen = []
    for owner, block in around_the_ring(own, comm):
        seen.append(owner)
        place = slice(3 * owner, 3 * owner + 3)
        np.testing.assert_array_equal(block, everyones[:, place])
    assert seen == [(rank - i) % p for i in range(p)]
    terms = rng.normal(size=(2, 3 * p, 5))
    expected = scatter_sum_of_tokens(terms, comm)
    got = reduce_scatter_around_the_ring(
        lambda r: terms[:, 3 * r : 3 * r + 3].reshape(-1, 5).copy(), comm
    )
    np.testing.assert_allclose(got.reshape(2, 3, 5), expected, rtol=1e-13)


def test_a_model_that_is_not_cut_is_refused():
    with pytest.raises(ValueError, match="call tensor_parallelize"):
        sequence_parallelize(GPT(GPTConfig()), alone())
