"""Every sample once an epoch, in an order that seed and step alone decide."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from mpiscale.data.batches import IGNORE, Batch, Batches
from mpiscale.data.token_file import TokenFile
from mpiscale.errors import InputError
from mpiscale.rng import permutation

WriteTokens: TypeAlias = Callable[..., Path]  # a fixture of conftest.py

ARRAYS = ("tokens", "labels", "samples", "positions", "documents")


@pytest.fixture
def token_file(write_tokens: WriteTokens) -> Iterator[TokenFile]:
    """12 windows of 5 tokens and 3 more: 63 tokens, all different from neighbours."""
    lists = [range(1, 5), range(11, 31), range(41, 42), range(51, 85)]
    path = write_tokens({"train": lists, "validation": [range(1, 20)]})
    with TokenFile(path) as file:
        yield file


def assert_same(a: Batch, b: Batch) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)
    assert (a.valid, a.step) == (b.valid, b.step)


def test_labels_are_the_next_token_unless_it_begins_a_document(
    write_tokens: WriteTokens,
) -> None:
    path = write_tokens({"train": [[5, 6], [7], [8, 9, 10]]})  # 5 6 0 7 0 8 9 10 0
    with TokenFile(path) as file:
        batches = Batches(file, "train", batch=2, length=4, seed=0)
        (batch,) = batches.evaluation_batches(1)
    assert batch.tokens.tolist() == [[5, 6, 0, 7], [0, 8, 9, 10]]
    assert batch.labels.tolist() == [[6, 0, IGNORE, 0], [IGNORE, 9, 10, 0]]
    assert batch.documents.tolist() == [[0, 0, 0, 1], [1, 2, 2, 2]]
    assert batch.positions.tolist() == [0, 1, 2, 3]
    assert batch.samples.tolist() == [0, 1]
    assert (batch.valid, batch.step) == (6, 0)
    for name in ARRAYS:
        assert getattr(batch, name).dtype == np.int64


@pytest.mark.parametrize("batch", [1, 4, 5, 7, 12, 13, 30])
def test_each_window_comes_exactly_once_per_epoch(
    token_file: TokenFile, batch: int
) -> None:
    batches = Batches(token_file, "train", batch, length=5, seed=3)
    assert batches.windows == 12
    steps = -(-12 * 5 // batch)
    seen = np.concatenate([batches.window_indices(step) for step in range(steps)])
    epochs = seen[: 12 * 5].reshape(5, 12)
    for epoch, order in enumerate(epochs):
        np.testing.assert_array_equal(order, permutation(12, 3, "epoch", epoch))
    assert len({tuple(order) for order in epochs.tolist()}) == 5


def test_batch_holds_the_tokens_of_its_windows(token_file: TokenFile) -> None:
    batches = Batches(token_file, "train", batch=8, length=5, seed=0)
    stream = token_file.read("train", 0, 63).astype(np.int64)
    for step in range(4):  # step 1 has samples of two epochs
        batch = batches(step)
        for row, window in enumerate(batches.window_indices(step)):
            inputs = stream[window * 5 : window * 5 + 5]
            after = stream[window * 5 + 1 : window * 5 + 6]
            np.testing.assert_array_equal(batch.tokens[row], inputs)
            kept = batch.labels[row] != IGNORE
            np.testing.assert_array_equal(kept, inputs != 0)
            np.testing.assert_array_equal(batch.labels[row][kept], after[kept])
        assert batch.valid == (batch.labels != IGNORE).sum()
        assert batch.step == step


@pytest.mark.parametrize("step", [1, 3, 4])
def test_samples_after_a_save_continue_the_epochs(
    token_file: TokenFile, step: int
) -> None:
    p0, p1 = (permutation(12, 9, "epoch", epoch) for epoch in (0, 1))
    expected = {1: p0[4:8], 3: p1[0:4], 4: p1[4:8]}[step]
    for ranks in (1, 2, 4):
        resumed = Batches(token_file, "train", batch=4, length=5, seed=9)
        np.testing.assert_array_equal(resumed.window_indices(step), expected)
        rows = [resumed(step).part(rank, ranks).tokens for rank in range(ranks)]
        stream = token_file.read("train", 0, 63)
        whole = [stream[w * 5 : w * 5 + 5] for w in expected]
        np.testing.assert_array_equal(np.concatenate(rows), whole)


def test_resuming_at_any_step_gives_the_same_sequence(token_file: TokenFile) -> None:
    def batches() -> Batches:
        return Batches(token_file, "train", batch=5, length=5, seed=1)

    run = [batches()(step) for step in range(15)]
    straight, backwards = batches(), batches()
    for step in range(15):
        assert_same(straight(step), run[step])
        assert_same(backwards(14 - step), run[14 - step])


def test_seeds_give_different_orders(token_file: TokenFile) -> None:
    orders = [
        Batches(token_file, "train", batch=12, length=5, seed=seed).window_indices(0)
        for seed in (0, 1)
    ]
    assert orders[0].tolist() != orders[1].tolist()


def test_reading_by_slices_equals_reading_from_memory(token_file: TokenFile) -> None:
    whole = Batches(token_file, "train", batch=5, length=5, seed=1)
    slices = Batches(token_file, "train", 5, 5, 1, in_memory_bytes=63)
    assert whole._whole is not None and slices._whole is None
    for step in range(6):
        assert_same(whole(step), slices(step))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_parts_of_all_ranks_make_the_whole_batch(
    token_file: TokenFile, ranks: int
) -> None:
    batch = Batches(token_file, "train", batch=5, length=5, seed=0)(2)
    parts = [batch.part(rank, ranks) for rank in range(ranks)]
    for name in ("tokens", "labels", "samples", "documents"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(batch, name), name)
    for rank, part in enumerate(parts):
        rule = np.array_split(np.arange(5), ranks)[rank]
        np.testing.assert_array_equal(part.samples, rule)
        assert part.tokens.shape == (len(rule), 5)
        assert (part.valid, part.step) == (batch.valid, 2)
        np.testing.assert_array_equal(part.positions, batch.positions)


def test_part_of_a_part_keeps_the_global_index(token_file: TokenFile) -> None:
    batch = Batches(token_file, "train", batch=8, length=5, seed=0)(0)
    micro_batch = batch.part(1, 2).part(0, 2)
    assert micro_batch.samples.tolist() == [4, 5]
    np.testing.assert_array_equal(micro_batch.tokens, batch.tokens[4:6])


@pytest.mark.parametrize("rank", [-1, 2])
def test_part_of_a_rank_that_is_none_is_refused(
    token_file: TokenFile, rank: int
) -> None:
    batch = Batches(token_file, "train", batch=4, length=5, seed=0)(0)
    with pytest.raises(ValueError, match=rf"^rank must be in 0 \.\.\. 1, got {rank}$"):
        batch.part(rank, 2)


def test_evaluation_visits_the_windows_in_order_and_ends_with_them(
    token_file: TokenFile,
) -> None:
    batches = Batches(token_file, "validation", batch=2, length=6, seed=0)
    assert batches.windows == 3  # of 20 tokens
    (first,) = batches.evaluation_batches(1)
    assert first.tokens.tolist() == [[*range(1, 7)], [*range(7, 13)]]
    everything = list(batches.evaluation_batches(10))
    assert_same(everything[0], first)
    assert [len(batch.samples) for batch in everything] == [2, 1]
    assert everything[1].tokens.tolist() == [[*range(13, 19)]]
    assert everything[1].valid == 6


def test_split_shorter_than_one_window_is_refused(token_file: TokenFile) -> None:
    assert Batches(token_file, "validation", 1, length=19, seed=0).windows == 1
    with pytest.raises(InputError) as error:
        Batches(token_file, "validation", batch=1, length=20, seed=0)
    assert str(error.value) == (
        "the validation split has 20 tokens, expected at least 21: one sample of "
        "length 20 and the token after it. Use a length of at most 19, or more text."
    )


def test_empty_split_is_refused(write_tokens: WriteTokens) -> None:
    with TokenFile(write_tokens({"train": [[5]]})) as file:
        with pytest.raises(InputError, match=r"has 0 tokens.*it\. Use more text\.$"):
            Batches(file, "validation", batch=1, length=4, seed=0)


def test_sizes_below_one_and_negative_steps_are_refused(
    token_file: TokenFile,
) -> None:
    with pytest.raises(InputError, match=r"^batch must be at least 1, got 0$"):
        Batches(token_file, "train", batch=0, length=5, seed=0)
    with pytest.raises(InputError, match=r"^length must be at least 1, got -1$"):
        Batches(token_file, "train", batch=1, length=-1, seed=0)
    with pytest.raises(ValueError, match=r"^step must not be negative, got -1$"):
        Batches(token_file, "train", batch=1, length=5, seed=0)(-1)


@pytest.mark.parametrize("in_memory_bytes", [1 << 28, 0])
def test_batch_costs_less_than_a_millisecond(
    write_tokens: WriteTokens, in_memory_bytes: int
) -> None:
    ids = np.random.default_rng(0).integers(1, 1000, 500)
    with TokenFile(write_tokens({"train": [ids] * 4000}, 1000)) as file:
        batches = Batches(file, "train", 8, 256, 0, in_memory_bytes)
        batches(0)
        seconds = []
        for step in range(200):
            begin = time.perf_counter()
            batches(step)
            seconds.append(time.perf_counter() - begin)
    assert np.median(seconds) < 1e-3
