"""The attention benchmark measures both kinds, in processes of their own."""

import pytest

from mpiscale.bench.attention import AttentionResult, AttentionShape, measure_attention


def test_both_kinds_are_measured_and_flash_needs_less_memory():
    shape = AttentionShape(batch=1, length=768, heads=2, head_size=16)
    result = measure_attention(shape, threads=1, passes=2)
    assert set(result.seconds) == set(result.peak_bytes) == {"flash", "plain"}
    assert all(seconds > 0 for seconds in result.seconds.values())
    # Plain attention holds at least the scores and their softmax: 2 h T^2 floats.
    assert result.peak_bytes["plain"] > 2 * 2 * 768**2 * 4
    assert result.peak_bytes["flash"] < result.peak_bytes["plain"] / 2


def test_the_table_says_how_much_faster_and_smaller():
    result = AttentionResult(
        {"flash": 0.1, "plain": 0.25}, {"flash": 2**20, "plain": 10 * 2**20}, 2.5
    )
    assert result.saved_memory == pytest.approx(0.9)
    assert "2.50 times as fast, 90% less memory" in result.table()
