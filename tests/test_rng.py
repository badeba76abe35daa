"""Random numbers that depend on names and indices only."""

import numpy as np

from mpiscale.rng import normal, permutation, philox, random_bits, stream_key

FLOAT64 = np.dtype(np.float64)


def test_philox_equals_the_published_vector():
    # Random123, kat_vectors, philox4x32 10: counter 0, key 0.
    words = philox(0, np.zeros((), np.uint64))
    assert [hex(w) for w in words] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]


def test_an_elements_bits_do_not_depend_on_its_neighbours():
    whole = random_bits(12345, np.arange(1000))
    np.testing.assert_array_equal(
        random_bits(12345, np.arange(7, 1000, 13)), whole[7::13]
    )
    assert (random_bits(12346, np.arange(1000)) != whole).mean() > 0.99
    far = np.array([2**31, 2**33 + 1, 2**40])
    assert len(set(random_bits(1, far).tolist())) == 3


def test_bits_are_uniform():
    u = random_bits(3, np.arange(200_000)) / 2**32
    assert abs(u.mean() - 0.5) < 0.002
    assert abs(u.var() - 1 / 12) < 0.001
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01


def test_keys_differ_by_seed_and_by_every_name():
    keys = [
        stream_key(0, "a", "b"),
        stream_key(0, "ab"),
        stream_key(0, "a", "b", ""),
        stream_key(1, "a", "b"),
        stream_key(0, "a", 1),
    ]
    assert len(set(keys)) == len(keys)
    assert stream_key(0, "a", "b") == keys[0]


def test_weights_depend_on_seed_and_name():
    a = normal((3, 4), FLOAT64, 1, "w")
    np.testing.assert_array_equal(a, normal((3, 4), FLOAT64, 1, "w"))
    assert (a != normal((3, 4), FLOAT64, 1, "v")).all()
    assert (a != normal((3, 4), FLOAT64, 2, "w")).all()
    assert abs(normal((100_000,), FLOAT64, 0, "x").std() - 1) < 0.01


def test_permutations_hold_every_entry_once():
    order = permutation(100, 3, "epoch", 0)
    assert sorted(order.tolist()) == list(range(100))
    assert (order != permutation(100, 3, "epoch", 1)).any()
