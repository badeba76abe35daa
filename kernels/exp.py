"""exp, the logistic function and the normal distribution, in loops that vectorise.

A call into the C library keeps a loop from being vectorised, and Numba's SVML is not
available with current LLVM. So float32 has its own polynomials; float64, in which
results are compared to 1e-12, calls the C library. Each function is an `overload`: a
compiled kernel gets the version of its argument's type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

# Products may be fused, but sums keep their order: the reduction of the argument
# below subtracts ln 2 in two parts, and 2^n is multiplied on in two halves. A function
# that is not inlined would keep the caller's loop from being vectorised.
OPTIONS: Any = {"fastmath": {"contract"}, "forceinline": True}

ONE = np.float32(1)
HALF = np.float32(0.5)
ZERO = np.float32(0)
LOG2_E = np.float32(1.44269504)
LN2_HIGH = np.float32(0.693359375)  # 9 bits: n * LN2_HIGH is exact
LN2_LOW = np.float32(-2.12194440e-4)
LOWEST = np.float32(-104)  # below, e^x rounds to 0
HIGHEST = np.float32(89)  # above, e^x is infinite
ZERO_BITS = np.int32(0)
ONE_BIT = np.int32(1)
EXPONENT_BIAS = np.int32(127)
MANTISSA_BITS = np.int32(23)

# (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2, from Cephes' expf (S. Moshier).
E0, E1, E2 = map(np.float32, (0.50000001201, 0.16666665459, 0.041665795894))
E3, E4, E5 = map(np.float32, (0.0083334519073, 0.0013981999507, 0.00019875691500))


def exp(x: float) -> float:
    """e^x; float32: relative error below 1e-7, -inf gives 0, overflow inf, NaN NaN."""
    return math.exp(x)


def _exp_float32(x: Any) -> Any:
    x = LOWEST if x < LOWEST else x  # comparisons with NaN are false: NaN stays
    x = HIGHEST if x > HIGHEST else x
    n = _nearest_integer(x * LOG2_E)
    r = x - n * LN2_HIGH - n * LN2_LOW
    polynomial = E0 + r * (E1 + r * (E2 + r * (E3 + r * (E4 + r * E5))))
    e_r = ONE + (r + r * r * polynomial)
    # 2^n alone would overflow for n = 128 and has no exponent bits for n < -126.
    exponent = np.int32(n) if n == n else ZERO_BITS
    half = exponent >> ONE_BIT
    return e_r * _power_of_two(half) * _power_of_two(exponent - half)


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x)."""
    return 1 / (1 + math.exp(-x))


def _sigmoid_float32(x: Any) -> Any:
    return ONE / (ONE + exp(-x))


def normal_cdf_and_density(x: float) -> tuple[float, float]:
    """Phi(x) = erfc(-x / sqrt(2)) / 2 and Phi'(x) = exp(-x^2 / 2) / sqrt(2 pi).

    float32: Phi has a relative error of about 2e-7 (more in the far tail, where
    rounding x^2 shifts e^(-x^2/2)).
    """
    return 0.5 * math.erfc(-x * SQRT_HALF), math.exp(-0.5 * x * x) * INV_SQRT_2PI


SQRT_HALF = math.sqrt(0.5)
INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
DENSITY_AT_0 = np.float32(INV_SQRT_2PI)

# The upper tail Phi(-a), a >= 0, is e^(-a^2/2) times a polynomial in t = 1/(1 + 0.3 a),
# the form of Abramowitz and Stegun 7.1.26, fitted anew to a relative error of 1.5e-7.
T_SCALE = np.float32(0.3)
T1, T2, T3, T4 = map(np.float32, (0.11962929, 0.12075412, 0.09991237, 0.12856571))
T5, T6, T7, T8 = map(np.float32, (-0.05369208, 0.20636341, -0.15720923, 0.03567634))


def _normal_cdf_and_density_float32(x: Any) -> Any:
    gauss = exp(-HALF * x * x)
    t = ONE / (ONE + T_SCALE * abs(x))
    high = T5 + t * (T6 + t * (T7 + t * T8))
    tail = gauss * (t * (T1 + t * (T2 + t * (T3 + t * (T4 + t * high)))))
    return (tail if x < ZERO else ONE - tail), gauss * DENSITY_AT_0


def _overload_by_type(
    function: Callable[..., Any], float32_version: Callable[..., Any]
) -> None:
    def choose_version(x: Any) -> Callable[..., Any]:
        return float32_version if x == types.float32 else function

    overload(function, jit_options=OPTIONS, strict=False)(choose_version)


def _rint(typing_context: Any, x: Any) -> Any:
    """LLVM's rint: one instruction, where Python's round() is a call."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rint = builder.module.declare_intrinsic("llvm.rint", [args[0].type])
        return builder.call(rint, args)

    return x(x), generate


_nearest_integer: Any = intrinsic(_rint)


def _exponent_bits(typing_context: Any, exponent: Any) -> Any:
    """2^exponent as float32, for -126 <= exponent <= 127: written into its bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bias = ir.Constant(ir.IntType(32), int(EXPONENT_BIAS))
        shift = ir.Constant(ir.IntType(32), int(MANTISSA_BITS))
        bits = builder.shl(builder.add(args[0], bias), shift)
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), generate


_power_of_two: Any = intrinsic(_exponent_bits)


_overload_by_type(exp, _exp_float32)
_overload_by_type(sigmoid, _sigmoid_float32)
_overload_by_type(normal_cdf_and_density, _normal_cdf_and_density_float32)
