"""Text from a model, token by token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiscale.backend import Array
from mpiscale.data.tokenizer import Tokenizer
from mpiscale.rng import stream_key


def generate(
    next_token: Callable[[Array, float, int], int],
    longest: int,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """`prompt` continued by up to `tokens` tokens; ends early at a document's end.

    The i-th token's noise is keyed by (seed, i): the same text on every layout. All
    ranks over which the model is spread call this, and get the same text.

    next_token: (window [1, t], temperature, key) -> id; it sees the last `longest`
        tokens.
    """
    ids = list(tokenizer.encode(prompt)) or [tokenizer.separator]
    for i in range(tokens):
        window = np.array([ids[-longest:]], np.int64)
        ids.append(next_token(window, temperature, stream_key(seed, "generate", i)))
        if ids[-1] == tokenizer.separator:
            break
    return tokenizer.decode(np.array(ids))
