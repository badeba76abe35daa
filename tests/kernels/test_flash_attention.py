"""Flash attention at the sizes and masks where tiles go wrong."""

import numpy as np
import pytest

from mpiscale.kernels.attention import flash_attention as attention
from tests.kernels.cases import drawing

LENGTHS = (1, 2, 31, 63, 64, 65, 127, 129, 200)
HEAD_SIZES = (1, 16, 63, 64, 80)
BOTH = pytest.mark.parametrize("version", ["reference", "numba"])


def forward_and_backward(version, *arguments):
    q, k, v, dout, scale, causal = arguments
    out, lse = getattr(attention, f"flash_attention_{version}")(q, k, v, scale, causal)
    backward = getattr(attention, f"flash_attention_backward_{version}")
    return out, lse, *backward(q, k, v, out, lse, dout, scale, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tq", LENGTHS)
def test_flash_attention_equals_reference_for_any_lengths(tq, causal):
    draw = drawing(np.float64)
    for n, tk in enumerate(LENGTHS):
        d = HEAD_SIZES[n % len(HEAD_SIZES)]
        b, h, hk = ((1, 1, 1), (3, 3, 3), (1, 6, 2))[n % 3]
        arrays = draw(b, tq, h, d), draw(b, tk, hk, d), draw(b, tk, hk, d + 1)
        arguments = *arrays, draw(b, tq, h, d + 1), d**-0.5, causal
        expected = forward_and_backward("reference", *arguments)
        got = forward_and_backward("numba", *arguments)
        for want, have in zip(expected, got, strict=True):
            np.testing.assert_allclose(have, want, 1e-10, 1e-12, err_msg=f"{tk=} {d=}")


@BOTH
def test_keys_past_the_end_are_not_seen(version):
    """A tile of 64 with 65 keys: counted, the padding would give 65 / 128."""
    q, k = np.ones((1, 65, 1, 4), np.float32), np.zeros((1, 65, 1, 4), np.float32)
    v = np.ones((1, 65, 1, 4), np.float32)
    out, _ = getattr(attention, f"flash_attention_{version}")(q, k, v, 1.0, False)
    np.testing.assert_allclose(out, 1, rtol=1e-6)


@BOTH
def test_query_that_sees_no_key_gives_zero_and_no_gradient(version):
    """As in tracel-ai/cubecl #1070: exp(-inf - (-inf)) would be NaN."""
    q, k = np.zeros((1, 3, 1, 1)), np.zeros((1, 2, 1, 1))
    v = np.array([2.0, 4.0]).reshape(1, 2, 1, 1)
    out, lse, dq, dk, dv = forward_and_backward(
        version, q, k, v, np.ones_like(q), 1.0, True
    )
    np.testing.assert_allclose(out.ravel(), [0, 2, 3])
    np.testing.assert_allclose(lse.ravel(), [-np.inf, 0, np.log(2)])
    assert dq[0, 0] == 0 and np.isfinite([*dq.ravel(), *dk.ravel()]).all()
    np.testing.assert_allclose(dv.ravel(), [1.5, 0.5])


@BOTH
def test_scores_of_minus_infinity_hide_their_keys(version):
    q, k = np.full((1, 1, 1, 1), -np.inf), np.array([1.0, 2.0]).reshape(1, 2, 1, 1)
    out, lse = getattr(attention, f"flash_attention_{version}")(q, k, k, 1.0, False)
    assert out == 0 and lse == -np.inf


@BOTH
def test_rows_whose_lse_is_minus_infinity_have_no_gradient(version):
    draw = drawing(np.float64)
    q, k, v, out, dout = (draw(1, 3, 1, 2) for _ in range(5))
    lse = np.array([2.0, -np.inf, 2.0]).reshape(1, 1, 3)
    backward = getattr(attention, f"flash_attention_backward_{version}")
    dq, *rest = backward(q, k, v, out, lse, dout, 1.0, False)
    others = [a[:, ::2] for a in (q, out, dout)]
    _, *expected = backward(
        others[0], k, v, others[1], lse[..., ::2], others[2], 1.0, False
    )
    np.testing.assert_array_equal(dq[0, 1], 0)
    for got, want in zip(rest, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


@BOTH
def test_large_scores_do_not_overflow(version):
    q = np.full((1, 2, 1, 1), 100, np.float32)
    k = np.array([100, 99], np.float32).reshape(1, 2, 1, 1)
    out, lse = getattr(attention, f"flash_attention_{version}")(q, k, k, 1.0, False)
    np.testing.assert_allclose(out, 100)
    np.testing.assert_allclose(lse, 10000)


def test_views_into_packed_arrays_equal_copies_of_them():
    packed = drawing(np.float32)(2, 70, 3, 2, 16)
    views = [packed[:, :, i] for i in range(3)]
    copies = [view.copy() for view in views]
    dout = drawing(np.float32)(2, 70, 2, 16)
    for view, copy in zip(
        forward_and_backward("numba", *views, dout, 0.25, True),
        forward_and_backward("numba", *copies, dout, 0.25, True),
        strict=True,
    ):
        np.testing.assert_array_equal(view, copy)


def test_head_counts_that_do_not_divide_are_an_error():
    q, k = np.zeros((1, 1, 4, 2)), np.zeros((1, 1, 3, 2))
    with pytest.raises(ValueError, match="4 query heads and 3 key-value heads"):
        attention.flash_attention_numba(q, k, k, 1.0, False)
