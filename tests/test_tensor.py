"""The graph and its walk: sums over uses, deep graphs, freeing, deferral."""

import gc
import time
import weakref

import numpy as np
import pytest

from mpiscale.gradcheck import check_gradients
from mpiscale.ops import shapes
from mpiscale.ops.activations import tanh
from mpiscale.ops.arithmetic import multiply
from mpiscale.ops.matmul import linear
from mpiscale.ops.reductions import mean
from mpiscale.ops.reductions import sum as total
from mpiscale.tensor import Tensor, no_grad


def leaf(value):
    return Tensor(np.asarray(value, float), requires_grad=True)


def test_a_value_with_two_consumers_gets_both_gradients():
    a = leaf(3.0)
    b = a * a
    c = b + b
    loss = c * b
    loss.backward()
    assert loss.item() == 2 * 3**4
    assert a.grad == 8 * 3**3


def test_broadcast_operands_keep_their_shapes():
    a, b = leaf([[1, 2, 3]]), leaf([[4], [5]])
    total(a * b).backward()
    np.testing.assert_array_equal(a.grad, [[9, 9, 9]])
    np.testing.assert_array_equal(b.grad, [[6], [6]])


def random_graph(x, y, rng, nodes):
    values = [x, y]
    for _ in range(nodes):
        a, b = (values[i] for i in rng.integers(len(values), size=2))
        values.append(
            [lambda a, b: a + b, lambda a, b: a * b, lambda a, b: tanh(a) - b][
                rng.integers(3)
            ](tanh(a), b)
        )
    return sum(values[2:], start=values[-1])


@pytest.mark.parametrize("nodes", [5, 12, 40])
def test_random_graphs_with_reuse(nodes):
    for seed in range(6):
        data = np.random.default_rng(seed).normal(size=(2, 3)) * 0.5
        check_gradients(
            lambda x, y, s=seed: random_graph(x, y, np.random.default_rng(s), nodes),
            data[0],
            data[1],
            tolerance=1e-5,
        )


@pytest.mark.parametrize("depth", [10, 1_000, 100_000])
def test_deep_graphs_need_no_recursion(depth):
    p, x = leaf(1.0), leaf(0.0)
    y = x
    for _ in range(depth):
        y = y + p
    y.backward()
    assert p.grad == depth
    assert x.grad == 1


def test_a_deep_graph_that_is_never_walked_can_be_freed():
    y = leaf(0.0)
    for _ in range(50_000):
        y = y + 1.0
    del y
    gc.collect()


def test_the_walk_takes_linear_time():
    def seconds(depth):
        y = p = leaf(1.0)
        for _ in range(depth):
            y = y + p
        started = time.process_time()
        y.backward()
        return time.process_time() - started

    seconds(1_000)
    assert min(seconds(20_000) for _ in range(3)) < 100 * min(
        seconds(2_000) for _ in range(3)
    )


def test_gradients_of_two_losses_add_up():
    x = leaf([1.0, 2.0])
    (x * 3.0).backward()
    (x * x).backward()
    np.testing.assert_array_equal(x.grad, [3 + 2, 3 + 4])


def test_a_gradient_buffer_is_written_first_and_added_to_later():
    x = leaf([1.0, 2.0])
    place = np.full(2, np.nan)  # never read before it is written
    x.grad_space = lambda: place
    (x * 3.0 + x).backward()
    assert x.grad is place
    np.testing.assert_array_equal(x.grad, [4, 4])


def test_a_shared_incoming_gradient_is_not_overwritten():
    x, y = leaf([1.0]), leaf([2.0])
    s = x + y  # hands the same array to both
    grad = np.array([1.0])
    (s + s * 2.0 + x).backward(grad)
    assert grad == 1.0
    assert (x.grad, y.grad) == (4.0, 3.0)


def test_the_graph_is_freed_as_backward_goes():
    alive = []
    x = leaf(np.ones(1000))
    y = x
    for _ in range(5):
        data = y.data.copy()
        alive.append(weakref.ref(data))
        y = Tensor.from_op(data, (y,), lambda grad, kept=data: (grad * kept,))
    del data
    y.backward()
    del y
    assert [r() for r in alive] == [None] * 5


def test_a_second_backward_says_that_the_graph_is_gone():
    x = leaf(2.0)
    y = x * x
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_no_grad_builds_no_graph():
    x = leaf(2.0)
    with no_grad():
        y = x * x
    assert not y.requires_grad
    with pytest.raises(ValueError, match="no_grad"):
        y.backward()
    assert (x * x).requires_grad


def test_a_leafs_hook_runs_when_its_gradient_is_complete_and_not_before():
    seen = []
    x, w1, w2 = leaf(np.ones((2, 3))), leaf(np.ones((3, 3))), leaf(np.ones((3, 3)))
    for name, w in (("w1", w1), ("w2", w2)):
        w.on_grad_ready = lambda t, n=name: seen.append((n, t.grad.copy()))
    y = linear(linear(linear(x, w1), w2), w1)  # w1 is used twice
    y.backward()
    assert [name for name, _ in seen] == ["w2", "w1"]
    np.testing.assert_array_equal(seen[1][1], w1.grad)


def test_deferred_weight_gradients_come_later_and_are_the_same():
    data = np.random.default_rng(0).normal(size=(3, 4, 4))
    grads = []
    for defer in (False, True):
        x, w1, w2 = (leaf(d) for d in data)
        ready = []
        w1.on_grad_ready = lambda t, seen=ready: seen.append(t.grad.copy())
        deferred = [] if defer else None
        linear(tanh(linear(x, w1)), w2).backward(deferred=deferred)
        if defer:
            assert w1.grad is None and w2.grad is None and not ready
            assert x.grad is not None
            for task in deferred:
                task()
        assert len(ready) == 1
        grads.append([x.grad, w1.grad, w2.grad])
    for now, later in zip(*grads, strict=True):
        np.testing.assert_array_equal(now, later)


def test_backward_from_the_middle_with_a_given_gradient():
    x = leaf([1.0, 2.0])
    y = x * 2.0
    y.backward(np.array([10.0, 100.0]))
    np.testing.assert_array_equal(x.grad, [20, 200])
    with pytest.raises(ValueError, match=r"gradient of shape \(3,\)"):
        (x * 2.0).backward(np.ones(3))


def test_an_op_that_returns_the_wrong_shape_is_refused():
    x = leaf(np.ones((2, 3)))
    y = Tensor.from_op(x.data * 1, (x,), lambda grad: (grad.sum(axis=0),))
    with pytest.raises(ValueError, match="gradient of shape"):
        y.backward()


def test_an_op_that_returns_too_few_gradients_is_refused():
    x, z = leaf(1.0), leaf(1.0)
    y = Tensor.from_op(x.data * 1, (x, z), lambda grad: (grad,))
    with pytest.raises(ValueError, match="zip"):
        y.backward()


def test_operators_take_numbers_and_arrays_on_both_sides():
    x = leaf([1.0, 2.0])
    array = np.array([5.0, 7.0])
    for got, expected in [
        (1 - x, [0, -1]),
        (2 / x, [2, 1]),
        (array * x, [5, 14]),
        (x - array, [-4, -5]),
        (-x, [-1, -2]),
        (x[1:], [2]),
    ]:
        np.testing.assert_array_equal(got.data, expected)


def test_mixed_types_and_bad_shapes_are_refused_with_both_named():
    x = Tensor(np.ones(3, np.float32), requires_grad=True)
    with pytest.raises(TypeError, match="float32 and float64"):
        multiply(x, np.ones(3))
    with pytest.raises(ValueError, match=r"\(3,\) and \(2,\) do not broadcast"):
        multiply(x, np.ones(2, np.float32))
    with pytest.raises(TypeError, match="int64"):
        Tensor(np.arange(3), requires_grad=True)
    with pytest.raises(ValueError, match="add up to 3"):
        shapes.split(x[None], (1, 2), axis=0)


def test_integers_are_not_cut_or_averaged_silently():
    x = Tensor(np.array([1, 2, 2**24 + 1]))
    with pytest.raises(TypeError, match=r"0\.5 with a tensor of int64"):
        x * 0.5
    with pytest.raises(TypeError, match="floating-point"):
        mean(x)
    assert total(x).item() == 2**24 + 4
    assert (x * 2).data.tolist() == [2, 4, 2**25 + 2]


def test_truth_and_powers():
    assert Tensor(np.ones(1)) and not Tensor(np.array(0.0))
    with pytest.raises(ValueError, match="more than one element"):
        bool(Tensor(np.ones(2)))
    check_gradients(lambda x: x**2 + x**-1.5, np.array([0.5, 2.0]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_tensors_keep_their_type_and_sum_in_float32(dtype):
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    x = Tensor(np.full(4096, 0.25, kind), requires_grad=True)
    y = total(x)
    y.backward()
    assert y.dtype == kind and x.grad.dtype == kind
    assert y.item() == 1024  # a 16-bit sum stops growing long before
    w = Tensor(np.ones((4096, 2), kind), requires_grad=True)
    z = linear(x[None], w)
    assert z.dtype == kind
    assert float(z.data[0, 0]) == 1024
