"""AdamW: Adam with decoupled weight decay, in place.

Source: I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", ICLR 2019.
"""

from __future__ import annotations

import math

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.choose import choose, expect_shape
from mpiscale.kernels.threads import row_kernel


def adamw_reference(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Update param, m and v in place, each [n]; `step` counts from 1.

    m = beta1 m + (1 - beta1) grad,  v = beta2 v + (1 - beta2) grad^2
    param = (1 - lr weight_decay) param - lr m^ / (sqrt(v^) + eps)
    m^ = m / (1 - beta1^step),  v^ = v / (1 - beta2^step)
    """
    m += (1 - beta1) * (grad - m)
    v += (1 - beta2) * (grad * grad - v)
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    param *= 1 - lr * weight_decay
    param -= lr * m_hat / (np.sqrt(v_hat) + eps)


def adamw_numba(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """As adamw_reference, in one pass over memory."""
    for name, array in (("param", param), ("grad", grad), ("m", m), ("v", v)):
        expect_shape(name, array, (param.size,))
    factors = (
        1 - beta1,
        1 - beta2,
        1 - lr * weight_decay,
        lr / (1 - beta1**step),
        1 / (1 - beta2**step),
        eps,
    )
    kind = param.dtype.type
    _adamw_elements(param.size, param, grad, m, v, *map(kind, factors))


@row_kernel
def _adamw_elements(
    lo: int,
    hi: int,
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    new_in_m: float,
    new_in_v: float,
    decay: float,
    rate: float,
    v_scale: float,
    eps: float,
) -> None:
    param, grad, m, v = param[lo:hi], grad[lo:hi], m[lo:hi], v[lo:hi]
    for i in range(param.size):
        g = grad[i]
        new_m = m[i] + new_in_m * (g - m[i])
        new_v = v[i] + new_in_v * (g * g - v[i])
        m[i], v[i] = new_m, new_v
        param[i] = decay * param[i] - rate * new_m / (math.sqrt(new_v * v_scale) + eps)


adamw = choose(adamw_reference, adamw_numba, writes=("param", "m", "v"))

if __name__ == "__main__":
    from mpiscale.kernels.bench import Case, main

    def arguments(x: Array) -> tuple[Array | float, ...]:
        """Flat arrays of their own, since they are written."""
        flat = (x.ravel().copy() for _ in range(3))
        return *flat, np.abs(x.ravel()), 1e-3, 0.9, 0.99, 1e-8, 0.1, 3

    main(Case(adamw_reference, adamw_numba, arguments))
