"""Random numbers keyed by (seed, names, index): no state, the same on every layout.

Weights are drawn whole from (seed, full name), then cut. Noise on activations takes
the element's global index as the counter of Philox-4x32-10, so that a mask does not
depend on who computes it, nor on how often.

Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import hashlib

import numpy as np

from mpiscale.backend import Array, DType

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
LOW_32_BITS = np.uint64(0xFFFFFFFF)
SHIFT_32 = np.uint64(32)


def stream_key(seed: int, *names: str | int) -> int:
    """A 64-bit key that differs for every seed and every sequence of names."""
    text = "\0".join([str(seed), *map(str, names)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def normal(shape: tuple[int, ...], dtype: DType, seed: int, name: str) -> Array:
    """Standard normal numbers for the parameter `name`; drawn in float64."""
    generator = np.random.Generator(np.random.Philox(key=stream_key(seed, name)))
    return generator.standard_normal(shape).astype(dtype)


def permutation(n: int, seed: int, *names: str | int) -> Array:
    """A random order of 0 ... n - 1, the same wherever it is asked for."""
    generator = np.random.Generator(np.random.Philox(key=stream_key(seed, *names)))
    return generator.permutation(n)


def philox(key: int, counter: Array) -> Array:
    """Philox-4x32-10: four random words for each counter.

    key: 64 bits; counter [...] uint64 (the low half of the 128-bit counter; the high
    half is 0) -> [..., 4] uint32.
    """
    words = [counter & LOW_32_BITS, counter >> SHIFT_32]
    words += [np.zeros_like(counter), np.zeros_like(counter)]
    keys = [key & 0xFFFFFFFF, key >> 32]
    m0, m1 = (np.uint64(m) for m in PHILOX_MULTIPLIERS)
    for _ in range(PHILOX_ROUNDS):
        c0, c1, c2, c3 = words
        p0, p1 = m0 * c0, m1 * c2
        k0, k1 = (np.uint64(k) for k in keys)
        words = [
            (p1 >> SHIFT_32) ^ c1 ^ k0,
            p1 & LOW_32_BITS,
            (p0 >> SHIFT_32) ^ c3 ^ k1,
            p0 & LOW_32_BITS,
        ]
        keys = [
            (k + step) & 0xFFFFFFFF
            for k, step in zip(keys, PHILOX_KEY_STEPS, strict=True)
        ]
    return np.stack(words, axis=-1).astype(np.uint32)


def random_bits(key: int, index: Array) -> Array:
    """32 random bits for each global index [...] int64 -> [...] uint32.

    Element i takes word i mod 4 of counter i // 4, so that four neighbours share one
    Philox block.
    """
    index = np.asarray(index).astype(np.uint64)
    block, lane = index >> np.uint64(2), index & np.uint64(3)
    words = philox(key, block)
    picked = np.take_along_axis(words, lane[..., None].astype(np.intp), axis=-1)
    return picked[..., 0]
