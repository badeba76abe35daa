"""Arithmetic of a training step, counted from the model's shape."""

from __future__ import annotations


def model_flops_per_token(
    matrix_parameters: int, layers: int, width: int, length: int
) -> int:
    """Floating-point operations per token, forward and backward.

    6 per weight of a matrix product (2 forward, 4 backward) and 12 L d T for the two
    products of attention with T keys; neither recomputation nor the half that causality
    skips is taken into account.

    Source: A. Chowdhery et al., "PaLM", 2022, appendix B.

    Args:
        matrix_parameters: weights that multiply activations: all matrices of the whole
            model but the embeddings that are only looked up.
        layers: L.
        width: d, heads x head size.
        length: T, tokens in a sequence.
    """
    return 6 * matrix_parameters + 12 * layers * width * length
