"""Tensor parallelism (Megatron-LM): every layer's matrices are cut over the ranks.

          x (whole on every rank)
          |  f: identity forward, all-reduce backward
      [ A1 | A2 ]      column-parallel: rank r holds a block of columns
          |  gelu, or attention on the rank's own heads
      [ B1 / B2 ]      row-parallel: rank r holds the matching block of rows
          |  g: all-reduce forward, identity backward
          y (whole on every rank)

    y = sum over ranks of  phi(x A_r) B_r        (Shoeybi et al. 2019, sec. 3)

Embedding and head are cut by vocabulary entries, and the loss is computed from local
logits: no rank ever holds the logits of the whole vocabulary. What is not cut (norms,
row biases, position embedding) is whole on every rank, with the same gradient.

`sequence_parallel.py` cuts these along the sequence.

Traffic: `traffic.py`. Memory per rank: parameters, gradients and optimizer state fall
to 1 / p but for the norms; activations only where heads and hidden features are.
"""
