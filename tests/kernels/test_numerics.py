"""Rows at the edge: infinities, constant rows, zero rows, ignored rows."""

import numpy as np
import pytest

from mpiscale.kernels import cross_entropy, dropout, exp, norm, softmax
from mpiscale.kernels.threads import compiled
from mpiscale.rng import philox, random_bits

INF = np.inf
BOTH = pytest.mark.parametrize("version", ["reference", "numba"])


def both(module, name, version):
    return getattr(module, f"{name}_{version}")


@BOTH
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_row_of_minus_infinity_gives_zeros_and_a_finite_gradient(version, dtype):
    x = np.array([[-INF, -INF, -INF], [-INF, 0, 0]], dtype)
    s = both(softmax, "softmax", version)(x)
    np.testing.assert_array_equal(s, [[0, 0, 0], [0, 0.5, 0.5]])
    dx = both(softmax, "softmax_backward", version)(s, np.ones_like(s))
    np.testing.assert_array_equal(dx, np.zeros_like(s))
    y = both(softmax, "log_softmax", version)(x)
    np.testing.assert_array_equal(y[0], x[0])
    dx = both(softmax, "log_softmax_backward", version)(y, np.ones_like(y))
    np.testing.assert_array_equal(dx[0], np.ones(3))


@BOTH
def test_each_row_is_shifted_by_its_own_maximum(version):
    x = np.array([[0, 0], [1000, 1000], [-1000, -1000]], np.float32)
    np.testing.assert_array_equal(both(softmax, "softmax", version)(x), 0.5)


@BOTH
def test_nan_in_a_row_shows(version):
    x = np.zeros((1, 40), np.float32)
    x[0, 3] = np.nan
    assert np.isnan(both(softmax, "softmax", version)(x)).all()


@BOTH
def test_layer_norm_of_a_row_far_from_zero_is_right(version):
    """As in microsoft/onnxruntime #28463."""
    x = np.array([[30000, 30001, 30002, 30003]], np.float32)
    ones = np.ones(4, np.float32)
    y, _, _ = both(norm, "layer_norm", version)(x, ones, None, 1e-5)
    expected = [[-1.341635, -0.447212, 0.447212, 1.341635]]
    np.testing.assert_allclose(y, expected, rtol=1e-6)


@BOTH
@pytest.mark.parametrize("mean", [0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("width", [1, 4, 31, 32, 33, 4096])
def test_layer_norm_survives_a_large_mean(version, mean, width):
    noise = np.random.default_rng(0).standard_normal((2, width))
    x = (mean + noise).astype(np.float32)
    x[1] = np.float32(mean + 0.3)  # a constant row: exactly 0
    gain, wide = np.ones(width, np.float32), x.astype(np.float64)
    y, centre, rstd = both(norm, "layer_norm", version)(x, gain, None, 1e-5)
    expected = wide - wide.mean(axis=1, keepdims=True)
    expected /= np.sqrt((expected**2).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(y[1], 0)
    backward = both(norm, "layer_norm_backward", version)
    assert all(np.isfinite(g).all() for g in backward(x, x, gain, centre, rstd))


@BOTH
def test_layer_norm_of_an_almost_constant_row_is_right(version):
    x = np.full((1, 4096), 1e9, np.float32)
    x[0, 5] = np.nextafter(x[0, 5], np.float32(INF))  # by 64: the variance is almost 1
    y, _, _ = both(norm, "layer_norm", version)(x, np.ones_like(x[0]), None, 1e-5)
    wide = x - x.mean(axis=1, dtype=np.float64, keepdims=True)
    np.testing.assert_allclose(y, wide / np.sqrt(np.mean(wide**2) + 1e-5), 1e-5)


@BOTH
def test_layer_norm_of_a_very_wide_constant_row_is_almost_zero(version):
    """The first mean is off by many roundings: the variance may come out negative."""
    x = np.broadcast_to(np.linspace(1e9, 2e9, 9, dtype=np.float32), (50_000, 9)).T
    y, _, _ = both(norm, "layer_norm", version)(x, np.ones_like(x[0]), None, 1e-5)
    np.testing.assert_allclose(y, 0, atol=1e-4)


@BOTH
def test_layer_norm_of_a_row_with_nan_or_infinity_shows_it(version):
    x = np.zeros((2, 40), np.float32)
    x[:, 3] = np.nan, INF
    with np.errstate(invalid="ignore"):
        y, _, _ = both(norm, "layer_norm", version)(x, np.ones_like(x[0]), None, 1e-5)
    assert np.isnan(y).all()


@BOTH
def test_layer_norm_gradient_of_a_row_far_from_zero_is_right(version):
    """A mean rounded to float32 shifts the row by up to 0.03 of its spread."""
    x, dy = np.random.default_rng(0).standard_normal((2, 3, 33)).astype(np.float32)
    x += np.float32(1e6)
    gain = np.linspace(0.5, 2, 33, dtype=np.float32)
    _, mean, rstd = norm.layer_norm_reference(x.astype(np.float64), gain, None, 1e-5)
    got = both(norm, "layer_norm_backward", version)(dy, x, gain, mean, rstd)
    wide = (a.astype(np.float64) for a in (dy, x, gain))
    expected = norm.layer_norm_backward_reference(*wide, mean, rstd)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@BOTH
def test_rms_norm_of_a_zero_row_has_a_finite_gradient(version):
    """As in pytorch/pytorch #2421: dx = dy / sqrt(eps), where sqrt has slope inf."""
    x, ones = np.zeros((1, 3), np.float32), np.ones(3, np.float32)
    y, rstd = both(norm, "rms_norm", version)(x, ones, 1e-5)
    dy = np.array([[1, 2, 3]], np.float32)
    dx, _ = both(norm, "rms_norm_backward", version)(dy, x, ones, rstd)
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_allclose(dx, dy * 316.2278, rtol=1e-6)


@BOTH
def test_statistics_of_shards_join_to_the_whole_loss(version):
    statistics = both(cross_entropy, "logits_statistics", version)
    logits = np.random.default_rng(0).standard_normal((4, 12))
    labels = np.array([0, 6, 9, -1])  # vocabulary of 10, two padding columns
    whole = statistics(logits, labels, 0, 10)
    shards = [statistics(logits[:, i : i + 3], labels, i, 10) for i in (0, 3, 6, 9)]
    maximum = np.max([part[0] for part in shards], axis=0)
    sum_exp = sum(part[1] * np.exp(part[0] - maximum) for part in shards)
    np.testing.assert_array_equal(maximum, whole[0])
    np.testing.assert_allclose(sum_exp, whole[1], rtol=1e-14)
    for which in (2, 3):
        joined = sum(part[which] for part in shards)
        np.testing.assert_allclose(joined, whole[which], rtol=1e-13, atol=1e-15)


@BOTH
def test_shard_of_padding_alone_says_nothing(version):
    logits, labels = np.full((2, 3), 7.0), np.array([1, 12])
    parts = both(cross_entropy, "logits_statistics", version)(logits, labels, 12, 10)
    for part, expected in zip(parts, (-INF, 0, 0, 0), strict=True):
        np.testing.assert_array_equal(part, expected)


@BOTH
def test_ignored_rows_and_padding_have_gradient_zero_even_if_not_finite(version):
    logits = np.array([[1, 2, np.nan], [np.nan, INF, 5]])
    dlogits = both(cross_entropy, "cross_entropy_backward", version)(
        logits,
        np.array([0, -100]),
        np.array([2.5, np.nan]),
        np.array([1.0, 0.0]),
        0.1,
        2,
        0,
    )
    assert np.isfinite(dlogits[0, :2]).all() and dlogits[0, 2] == 0
    np.testing.assert_array_equal(dlogits[1], 0)


def test_compiled_philox_equals_the_published_vector_and_the_serial_generator():
    """Random123's known answers for counter 0, key 0."""
    words = np.empty(4, np.uint64)
    dropout.philox_block(np.uint64(0), np.uint64(0), words)
    assert [f"{w:08x}" for w in words] == [
        "6627e8d5",
        "e169c58d",
        "bc57ac4c",
        "9b00dbd8",
    ]
    key, counter = 2**64 - 3, np.array([5, 2**40 + 7], np.uint64)
    for c, expected in zip(counter, philox(key, counter), strict=True):
        dropout.philox_block(np.uint64(key), c, words)
        np.testing.assert_array_equal(words, expected)


@BOTH
def test_dropout_keeps_the_elements_that_the_generator_says(version):
    rows, columns, key, p = np.array([3, 2**34]), np.array([0, 1, 2, 9, 8]), 77, 0.4
    y = both(dropout, "dropout", version)(np.ones((2, 5)), p, key, rows, columns)
    keep = random_bits(key, rows[:, None] + columns) >= p * 2**32
    np.testing.assert_allclose(y, keep / (1 - p))


@BOTH
def test_dropout_rejects_a_probability_of_one(version):
    zero = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match=r"probability is 1.0, expected 0 <= p < 1"):
        both(dropout, "dropout", version)(np.ones((1, 1)), 1.0, 0, zero, zero)


@compiled
def exp_of_each(x, y):
    for i in range(x.size):
        y[i] = exp.exp(x[i])


@compiled
def exp_of_each_nonpositive(x, y):
    for i in range(x.size):
        y[i] = exp.exp_of_nonpositive(x[i])


@compiled
def normal_of_each(x, cdf, density):
    for i in range(x.size):
        cdf[i], density[i] = exp.normal_cdf_and_density(x[i])


def test_float32_exp_has_a_relative_error_below_2e_7():
    x = np.linspace(-87, 88.7, 1_000_003).astype(np.float32)
    y = np.empty_like(x)
    exp_of_each(x, y)
    np.testing.assert_allclose(y, np.exp(x.astype(np.float64)), rtol=2e-7)


def test_float32_exp_at_its_edges_equals_numpy():
    edges = [-INF, INF, np.nan, -200, 200, -103.9, -90, 88.72283, 88.7229, 0, -0.0]
    x = np.array(edges, np.float32)
    y = np.empty_like(x)
    exp_of_each(x, y)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(y, np.exp(x), rtol=2e-7)


def test_float32_exp_of_nonpositive_numbers_equals_numpy_and_ends_in_zeros():
    x = np.linspace(-87.3, 0, 1_000_003).astype(np.float32)
    y = np.empty_like(x)
    exp_of_each_nonpositive(x, y)
    np.testing.assert_allclose(y, np.exp(x.astype(np.float64)), rtol=2e-7)
    edges = np.array([-87.4, -89, -1e4, -1e30, -INF, np.nan, -0.0], np.float32)
    y = np.empty_like(edges)
    exp_of_each_nonpositive(edges, y)
    np.testing.assert_array_equal(y, [0, 0, 0, 0, 0, np.nan, 1])


def test_float32_normal_distribution_has_a_small_relative_error():
    x = np.linspace(-13, 13, 100_001).astype(np.float32)
    cdf, density = np.empty_like(x), np.empty_like(x)
    normal_of_each(x, cdf, density)
    for got, expected in zip(
        (cdf, density),
        np.transpose([exp.normal_cdf_and_density(float(a)) for a in x]),
        strict=True,
    ):
        error = np.abs(got / expected - 1)
        assert (error / (1 + np.square(x) / 4)).max() < 5e-7


def test_float32_normal_distribution_far_out_is_zero_or_one():
    x = np.array([-INF, -1e30, -14, 14, 1e30, INF, np.nan], np.float32)
    cdf, density = np.empty_like(x), np.empty_like(x)
    normal_of_each(x, cdf, density)
    np.testing.assert_array_equal(cdf, [0, 0, 0, 1, 1, 1, np.nan])
    np.testing.assert_array_equal(density, [0, 0, 0, 0, 0, 0, np.nan])
