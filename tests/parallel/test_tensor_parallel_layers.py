"""Each cut layer does what the whole layer does, forward and backward."""

import math

import numpy as np
import pytest

from mpiscale.errors import InputError
from mpiscale.nn.flat import materialize
from mpiscale.nn.language_model import CrossEntropyLoss, Sampler, VocabularyHead
from mpiscale.nn.layers import Embedding, Linear
from mpiscale.nn.module import Module
from mpiscale.nn.parameter import Normal
from mpiscale.ops.activations import gelu_tanh
from mpiscale.ops.cross_entropy import IGNORE, cross_entropy
from mpiscale.ops.dropout import dropout
from mpiscale.parallel.sharding import AxisShard, gather_whole, padded_shard
from mpiscale.parallel.tensor_parallel.column_parallel_linear import (
    ColumnParallelLinear,
)
from mpiscale.parallel.tensor_parallel.row_parallel_linear import RowParallelLinear
from mpiscale.parallel.tensor_parallel.vocab_parallel_cross_entropy import (
    VocabParallelCrossEntropy,
    VocabParallelSampler,
)
from mpiscale.parallel.tensor_parallel.vocab_parallel_embedding import (
    VocabParallelEmbedding,
    VocabParallelHead,
)
from mpiscale.tensor import Tensor
from tests.parallel.serial_twin import CLOSE, FLOAT64, world

INIT = Normal(1.0)


class MLP(Module):
    def __init__(self, n, hidden, bias):
        self.up, self.down = (
            Linear(n, (hidden,), INIT, bias),
            Linear(hidden, (n,), INIT, bias),
        )

    def forward(self, x):
        return self.down(gelu_tanh(self.up(x)))


def randomize(model, seed=0):
    """Values that no symmetry makes equal; the same whole on every layout."""
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        whole = rng.normal(size=parameter.full_shape)
        parameter.data[...] = parameter.shard.cut(whole) if parameter.shard else whole


@pytest.mark.mpi(ranks=(1, 2, 3, 4, 8))
def test_column_then_row_equals_serial_mlp():
    comm = world()
    for bias in (True, False):
        for rows in (3, 2000):  # below and above the eager limit
            n, hidden = 5, 24
            x, dy = np.random.default_rng(1).normal(size=(2, rows, n))
            serial, cut = MLP(n, hidden, bias), MLP(n, hidden, bias)
            cut.replace("up", ColumnParallelLinear(cut.up, comm))
            cut.replace("down", RowParallelLinear(cut.down, comm))
            results = []
            for model in (serial, cut):
                materialize(model, 0, FLOAT64)
                randomize(model)
                tensor = Tensor(x, requires_grad=True)
                y = model(tensor)
                y.backward(dy)
                grads = [gather_whole(p, p.grad, comm) for p in model.parameters()]
                results.append([y.data, tensor.grad, *grads])
            for got, expected in zip(*reversed(results), strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.mpi(ranks=(1, 2, 4))
def test_a_row_layers_bias_is_added_once_and_learns_at_full_speed():
    comm = world()
    whole = Linear(4, (1,), INIT)
    layer = RowParallelLinear(whole, comm)
    materialize(layer, 0, FLOAT64)
    layer.weight.data[...] = 1
    layer.bias.data[...] = 5
    x = np.array([[1.0, 2, 3, 4]] * 3)
    mine = np.array_split(x, comm.size, axis=1)[comm.rank]
    y = layer(Tensor(mine))
    y.backward(np.ones((3, 1)))
    np.testing.assert_array_equal(y.data, [[15]] * 3)
    np.testing.assert_array_equal(layer.bias.grad, [3])


@pytest.mark.mpi(ranks=(2, 4))
def test_fused_outputs_are_cut_section_by_section():
    comm = world()
    whole = Linear(1, (4, 8), INIT, bias=False)
    layer = ColumnParallelLinear(whole, comm)
    full = np.arange(12.0)[None]
    n = 4 // comm.size
    a = np.arange(4).reshape(comm.size, n)[comm.rank]
    b = 4 + np.arange(8).reshape(comm.size, 2 * n)[comm.rank]
    np.testing.assert_array_equal(layer.weight.shard.cut(full)[0], [*a, *b])


def test_shards_cut_and_put_back_whatever_the_ranges():
    full = np.random.default_rng(0).normal(size=(5, 7))
    for axis, ranges in [(0, ((1, 3), (4, 5))), (1, ((0, 2), (6, 7), (2, 3)))]:
        shard = AxisShard(axis, ranges, padding=2)
        part = shard.cut(full)
        assert part.shape == shard.shape_of(full.shape)
        copy = np.zeros_like(full)
        shard.put(part, copy)
        index = np.concatenate([np.arange(a, b) for a, b in ranges])
        np.testing.assert_array_equal(copy.take(index, axis), full.take(index, axis))
        assert np.count_nonzero(copy) == full.take(index, axis).size
    for n in range(1, 18):
        for ranks in (1, 2, 3, 4, 8):
            shards = [padded_shard(0, n, r, ranks) for r in range(ranks)]
            assert sum(s.length for s in shards) == n
            assert len({s.shape_of((n,)) for s in shards}) == 1


@pytest.mark.mpi(ranks=(2, 3))
def test_features_that_do_not_divide_are_refused_with_the_arithmetic():
    comm = world()
    message = r"length 7\) into . equal blocks: 7 = . x . \+ 1"
    with pytest.raises(InputError, match=message):
        ColumnParallelLinear(Linear(4, (7,), INIT), comm)
    with pytest.raises(InputError, match=message):
        RowParallelLinear(Linear(7, (4,), INIT), comm)


class Vocabulary(Module):
    """Embedding, head and loss over V entries: a bigram model."""

    def __init__(self, v, d, tied, smoothing):
        self.embedding = Embedding(v, d, INIT)
        self.head = VocabularyHead(v, d, self.embedding if tied else None)
        self.loss_function = CrossEntropyLoss(smoothing)

    def cut(self, v, comm):
        self.replace("embedding", VocabParallelEmbedding(self.embedding, comm))
        self.replace("head", VocabParallelHead(self.head, comm))
        self.loss_function = VocabParallelCrossEntropy(self.loss_function, comm, v)


def vocabulary_run(v, tied, smoothing, scale, comm, cut):
    model = Vocabulary(v, 4, tied, smoothing)
    if cut:
        model.cut(v, comm)
    materialize(model, 0, FLOAT64)
    randomize(model)
    rng = np.random.default_rng(2)
    ids, labels = rng.integers(0, v, size=(2, 3, 5))
    ids[0], labels[0, 1] = v - 1, IGNORE
    labels[0, 0] = v - 1
    loss = model.loss_function(model.head(model.embedding(ids)) * scale, labels, None)
    loss.backward()
    grads = [gather_whole(p, p.grad, comm) for p in model.parameters()]
    padding = [p.grad[p.shard.length :] for p in model.parameters() if p.shard]
    return [loss.data, *grads], padding


@pytest.mark.mpi(ranks=(1, 2, 3, 4, 8))
def test_every_vocabulary_size_gives_the_serial_loss_and_gradients():
    comm = world()
    for v in (*range(1, 18), 50257):
        for tied in (True, False):
            for smoothing, scale in ((0.0, 1.0), (0.1, 1.0), (0.9, 1e3)):
                if v > 100 and smoothing == 0.1:
                    continue
                case = (v, tied, smoothing, scale)
                expected, _ = vocabulary_run(*case, comm, cut=False)
                got, padding = vocabulary_run(*case, comm, cut=True)
                for a, b in zip(got, expected, strict=True):
                    np.testing.assert_allclose(
                        a, b, rtol=1e-11, atol=1e-12 * scale, err_msg=str(case)
                    )
                assert all((rows == 0).all() for rows in padding)


@pytest.mark.mpi(ranks=(4,))
def test_padding_never_enters_the_softmax():
    comm = world()
    for v, columns in ((10, 3), (5, 2)):
        loss = VocabParallelCrossEntropy(CrossEntropyLoss(), comm, v)
        logits = Tensor(np.zeros((2, columns)), requires_grad=True)
        value = loss(logits, np.array([0, v - 1]), None)
        value.backward()
        assert value.item() == pytest.approx(math.log(v), rel=1e-14)
        real = max(0, min(columns, v - comm.rank * columns))
        assert (logits.grad[:, real:] == 0).all()
        assert (logits.grad[:, :real] != 0).all()


@pytest.mark.mpi(ranks=(2,))
def test_smoothing_is_over_the_whole_vocabulary_on_every_rank():
    comm = world()
    mine = np.array([[2.0, 1.0], [0.0, -1.0]])[comm.rank]
    loss = VocabParallelCrossEntropy(CrossEntropyLoss(0.1), comm, 4)
    value = loss(Tensor(mine[None]), np.array([0]), None)
    assert value.item() == pytest.approx(0.590190, abs=5e-7)


@pytest.mark.mpi(ranks=(1, 2, 4))
def test_ids_and_labels_outside_the_vocabulary_are_refused_by_all_ranks():
    comm, v = world(), 7  # padded to 8 on 2 and 4 ranks: 7 is padding, 8 beyond it
    model = Vocabulary(v, 4, True, 0.0)
    model.cut(v, comm)
    materialize(model, 0, FLOAT64)
    hidden = Tensor(np.zeros((1, 2, 4)))
    for wrong in (-1, -3, v, 8, 9):
        with pytest.raises(ValueError, match=rf"token id {wrong} at index \(0, 1\)"):
            model.embedding(np.array([[0, wrong]]))
        with pytest.raises(ValueError, match=rf"label {wrong} at index \(0, 1\)"):
            model.loss_function(model.head(hidden), np.array([[0, wrong]]), None)
    few_bits = model.embedding(np.array([[v - 1, 0]], np.uint8)).data
    many_bits = model.embedding(np.array([[v - 1, 0]])).data
    np.testing.assert_array_equal(few_bits, many_bits)
    fine = np.array([[v - 1, IGNORE]])
    model.loss_function(model.head(hidden), fine, None)
    comm.Barrier()  # nobody was left in a collective


@pytest.mark.mpi(ranks=(1, 2, 3, 4, 8))
def test_all_labels_ignored_is_loss_0_without_nan():
    comm = world()
    loss = VocabParallelCrossEntropy(CrossEntropyLoss(0.1), comm, 5)
    columns = -(-5 // comm.size)
    logits = Tensor(np.ones((3, columns)), requires_grad=True)
    value = loss(logits, np.full(3, IGNORE), None)
    value.backward()
    assert value.item() == 0
    assert (logits.grad == 0).all()


@pytest.mark.mpi(ranks=(1, 2, 3, 4, 8))
def test_sampling_gives_the_same_entry_on_every_layout_and_never_padding():
    comm, v = world(), 10
    sampler = VocabParallelSampler(Sampler(), comm, v)
    logits = np.random.default_rng(0).normal(size=v)
    shard = padded_shard(0, v, comm.rank, comm.size)
    mine = shard.cut(logits)
    mine[shard.length :] = 1e9  # what stands in the padding must not matter
    for key in range(200):
        for temperature in (0.0, 1.0):
            expected = Sampler()(logits, temperature, key)
            assert sampler(mine, temperature, key) == expected


def test_gumbel_max_samples_the_softmax():
    logits = np.log(np.array([0.5, 0.3, 0.2]))
    draws = [Sampler()(logits, 1.0, key) for key in range(20_000)]
    share = np.bincount(draws, minlength=3) / len(draws)
    np.testing.assert_allclose(share, [0.5, 0.3, 0.2], atol=0.012)


@pytest.mark.mpi(ranks=(4,))
def test_masks_are_equal_where_activations_are_and_differ_where_they_differ():
    """dp = 2, tp = 2: replicated activations share a mask over tp, not over dp."""
    comm = world()
    dp, tp = divmod(comm.rank, 2)
    for p, agreement in ((0.5, 0.5), (0.1, 0.82)):
        rows = 64
        row = (dp * rows + np.arange(rows)) * 128  # dp cuts the batch
        kept = []
        for column in (np.arange(64), tp * 64 + np.arange(64)):
            y = dropout(Tensor(np.ones((rows, 64))), p, 11, row, column)
            kept.append(y.data != 0)
        replicated, sharded = (comm.allgather(mask.tobytes()) for mask in kept)

        def agree(masks, a, b):
            x, y = (np.frombuffer(masks[i], bool) for i in (a, b))
            return (x == y).mean()

        assert agree(replicated, 0, 1) == 1 and agree(replicated, 2, 3) == 1
        assert abs(agree(replicated, 0, 2) - agreement) < 0.03
        for a, b in ((0, 1), (0, 2), (1, 3), (0, 3)):
            assert abs(agree(sharded, a, b) - agreement) < 0.03


@pytest.mark.mpi(ranks=(2,))
def test_local_cross_entropy_of_one_rank_equals_the_serial_op():
    comm = world()
    rng = np.random.default_rng(0)
    data, labels = rng.normal(size=(4, 6)), np.array([0, 5, IGNORE, 3])
    whole = Tensor(data, requires_grad=True)
    expected = cross_entropy(whole, labels, valid=10)
    expected.backward()
    mine = Tensor(np.split(data, 2, axis=1)[comm.rank], requires_grad=True)
    loss = VocabParallelCrossEntropy(CrossEntropyLoss(), comm, 6)(mine, labels, 10)
    loss.backward()
    np.testing.assert_allclose(loss.data, expected.data, **CLOSE)
    np.testing.assert_allclose(
        mine.grad, np.split(whole.grad, 2, axis=1)[comm.rank], **CLOSE
    )
