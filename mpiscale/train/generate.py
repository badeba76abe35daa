"""Text from a model, token by token."""

from __future__ import annotations

import numpy as np

from mpiscale.data.tokenizer import Tokenizer
from mpiscale.nn.language_model import LanguageModel
from mpiscale.nn.module import evaluating
from mpiscale.nn.placement import Placement
from mpiscale.rng import stream_key
from mpiscale.tensor import no_grad


def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """`prompt` continued by up to `tokens` tokens; ends early at a document's end.

    The i-th token's noise is keyed by (seed, i): the same text on every layout. The
    model sees the last `model.length` tokens; with tensor parallelism every rank calls
    this and gets the same text.
    """
    ids = list(tokenizer.encode(prompt)) or [tokenizer.separator]
    with evaluating(model), no_grad():
        for i in range(tokens):
            window = np.array([ids[-model.length :]], np.int64)
            placement = Placement.whole(1, window.shape[1])
            last = model.hidden(window, placement)[:, -1]
            logits = model.logits(last).data[0]
            key = stream_key(seed, "generate", i)
            ids.append(model.sampler(logits, temperature, key))
            if ids[-1] == tokenizer.separator:
                break
    return tokenizer.decode(np.array(ids))
