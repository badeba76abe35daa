"""Activations of a GPT in closed form: what its ops keep from forward to backward.

Counted as V. Korthikanti et al., "Reducing activation recomputation in large
transformer models", 2022, section 4.1 do: op by op, what its backward reads, where
an array that several ops keep counts once. Per token, s = itemsize, d = width,
h = heads, hk = key/value heads:

per layer
    s d              input of norm1
    16               its mean and 1 / deviation
    s d              its output: input of the q, k, v product
    s d (1 + 2 hk/h) q, k and v
    s d + s h        output of attention, log-sum-exp: the scores are recomputed
                     (the paper's count keeps them: 5 h T bytes in 16 bits)
    s d              input of norm2: the residual stream after attention
    16               its mean and 1 / deviation
    s d              its output: input of the MLP
    s 4 d            input of GELU
    s 4 d            its output: input of the second product
    8 + 8            dropout: index of the token, twice; masks are drawn again
once
    8                token id (embedding)
    s d + 16 + s d   input, statistics and output of the final norm
    s V              logits
    8 + 1            label, and whether it counts
    s + s            log of the softmax's denominator, loss
    8                dropout after the embedding
besides, whatever the number of tokens
    8 T              positions of one sample
    8 d              dropout: index of the feature, in each of the 2 L + 1 places

With hk = h that is s (16 d + h) + 32 per token and layer.
"""

from __future__ import annotations

from mpiscale.models.gpt import GPTConfig

ID_BYTES = 8  # int64 token ids, labels, positions, indices of dropout
STATISTIC_BYTES = 8  # layer norm keeps mean and 1 / deviation in float64


def gpt_activation_bytes(config: GPTConfig, batch: int, itemsize: int) -> int:
    """Bytes that a GPT keeps at the end of forward, on one process: the sum above.

    Args:
        config: the model's shape.
        batch: b, samples of `config.length` tokens T each.
        itemsize: s, bytes of a number: 4 or 8.
    """
    d, t, layers = config.width, config.length, config.layers
    kv_heads = config.heads if config.kv_heads is None else config.kv_heads
    kv_width = d // config.heads * kv_heads
    s, dropouts = itemsize, 2 * layers + 1 if config.dropout else 0

    norms = 2 * (2 * s * d + 2 * STATISTIC_BYTES)
    attention = s * (d + 2 * kv_width) + s * (d + config.heads)
    mlp = 2 * s * 4 * d
    layer = norms + attention + mlp
    tail = 2 * s * d + 2 * STATISTIC_BYTES + s * config.vocabulary + 2 * s
    ids = 2 * ID_BYTES + 1
    per_token = layers * layer + tail + ids + dropouts * ID_BYTES
    return batch * t * per_token + ID_BYTES * (t + dropouts * d)
