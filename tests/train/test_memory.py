"""The memory report: what the graph keeps, against closed formulas, to the byte."""

import os

import numpy as np
import pytest

from mpiscale.models.gpt import GPT, GPTConfig
from mpiscale.nn.flat import materialize
from mpiscale.nn.placement import Noise, Placement
from mpiscale.ops.activations import gelu_tanh, relu
from mpiscale.ops.arithmetic import add, multiply
from mpiscale.tensor import Tensor, no_grad
from mpiscale.train.activation_bytes import gpt_activation_bytes
from mpiscale.train.memory import (
    MIB,
    MemoryReport,
    memory_table,
    peak_resident_bytes,
    saved_arrays,
    saved_bytes,
)

GPTS = {
    "small": GPTConfig(vocabulary=19, length=12, layers=2, width=24, heads=6),
    "one layer, one head": GPTConfig(
        vocabulary=256, length=5, layers=1, width=8, heads=1
    ),
    "grouped heads, untied": GPTConfig(
        vocabulary=33, length=64, layers=3, width=32, heads=8, kv_heads=2, tied=False
    ),
    "dropout, smoothing": GPTConfig(
        vocabulary=50, length=16, layers=2, width=16, heads=2, dropout=0.1,
        label_smoothing=0.1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", GPTS)
def test_a_gpt_keeps_what_the_formula_says_to_the_byte(name, dtype, batch):
    config = GPTS[name]
    model = GPT(config)
    flat = materialize(model, 1, np.dtype(dtype))
    tokens = np.zeros((batch, config.length), np.int64)
    labels = np.ones_like(tokens)
    placement = Placement.whole(batch, config.length, Noise(1, 1))
    loss = model.loss(tokens, labels, placement)
    expected = gpt_activation_bytes(config, batch, flat.data.itemsize)
    assert saved_bytes([loss], (flat.data, flat.grad)) == expected
    loss.backward()
    assert saved_bytes([loss], (flat.data, flat.grad)) == 0


def test_an_array_that_two_ops_keep_counts_once():
    x = Tensor(np.ones(1000), requires_grad=True)
    y = multiply(x, x)  # new array, kept by both of the next ops
    loss = add(gelu_tanh(y), relu(y))  # relu keeps a mask of 1000 bytes instead
    assert saved_bytes([loss], [x.data]) == 8000 + 1000


def test_views_count_as_the_block_that_they_keep_alive():
    block = np.ones(1000)
    x = Tensor(block[:10].reshape(2, 5), requires_grad=True)
    y = gelu_tanh(x)
    assert saved_bytes([y], []) == 8000
    assert saved_bytes([y], [block[990:]]) == 0


def test_a_tensor_without_graph_keeps_nothing():
    x = Tensor(np.ones(10), requires_grad=True)
    with no_grad():
        assert list(saved_arrays(gelu_tanh(x))) == []


def test_workspace_is_the_peak_minus_everything_else():
    report = MemoryReport(10 * MIB, 20 * MIB, 40 * MIB, 80 * MIB, 100 * MIB, 300 * MIB)
    assert report.workspace == 50 * MIB
    table = memory_table([report, report]).splitlines()
    assert table[0].split()[2:] == [
        "parameters", "gradients", "optimizer", "activations", "workspace", "before",
        "peak",
    ]  # fmt: skip
    numbers = ["10.0", "20.0", "40.0", "80.0", "50.0", "100.0", "300.0"]
    assert table[1].split() == ["rank", "0", *numbers]
    assert table[2].split() == ["rank", "1", *numbers]


def test_the_peak_is_in_bytes_and_holds_an_array_that_was_written():
    array = np.ones(64 * MIB, np.uint8)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert array.nbytes < peak_resident_bytes() < machine
