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
from numba import njit, types
from numba.extending import intrinsic, overload

# Products may be fused, but sums keep their order: rounding by adding and subtracting
# TO_INTEGER relies on it, and so does taking ln 2 from x in two parts. A function that
# is not inlined would keep the caller's loop from being vectorised.
OPTIONS: Any = {"fastmath": {"contract"}, "forceinline": True}

ONE = np.float32(1)
HALF = np.float32(0.5)
ZERO = np.float32(0)
LOG2_E = np.float32(1.44269504)
LN2 = np.float32(0.69314718)
LN2_HIGH = np.float32(0.693359375)  # 9 bits: n * LN2_HIGH is exact
LN2_LOW = np.float32(-2.12194440e-4)
LOWEST = np.float32(-104)  # below, e^x rounds to 0
LOWEST_NORMAL = np.float32(-87.33654)  # below, e^x has fewer than 24 bits
HIGHEST = np.float32(89)  # above, e^x is infinite
TO_INTEGER = np.float32(3 * 2**22)  # n + TO_INTEGER has n in its lowest bits
EXPONENT_BIAS = 127
MANTISSA_BITS = 23

# (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2: the fit with the least largest relative
# error of e^r, which is 3e-9.
E0, E1, E2 = map(np.float32, (0.49999993452, 0.16666520690, 0.041668387364))
E3, E4 = map(np.float32, (0.0083687098281, 0.0013814613131))


def exp(x: float) -> float:
    """e^x; float32: relative error below 1e-7, -inf gives 0, overflow inf, NaN NaN."""
    return math.exp(x)


def _exp_float32(x: Any) -> Any:
    """e^x = 2^n e^r with n = round(x / ln 2) and so |r| <= ln(2) / 2."""
    x = LOWEST if x < LOWEST else x  # comparisons with NaN are false: NaN stays
    x = HIGHEST if x > HIGHEST else x
    shifted = x * LOG2_E + TO_INTEGER
    n = shifted - TO_INTEGER
    # 2^n alone would overflow for n = 128 and has no exponent bits for n < -126.
    half = HALF * n + TO_INTEGER
    other_half = shifted - (half - TO_INTEGER)
    e_r = _exp_near_0(x - n * LN2_HIGH - n * LN2_LOW)
    return e_r * _power_of_two(half) * _power_of_two(other_half)


def exp_of_nonpositive(x: float) -> float:
    """e^x for x <= 0, as in a softmax's shifted rows: cheaper than `exp`.

    float32: relative error below 1e-7, and 0 instead of results below 1.2e-38.
    """
    return math.exp(x)


def _exp_of_nonpositive_float32(x: Any) -> Any:
    shifted = x * LOG2_E + TO_INTEGER
    n = shifted - TO_INTEGER
    e_x = _exp_near_0(x - n * LN2_HIGH - n * LN2_LOW) * _power_of_two(shifted)
    return ZERO if x < LOWEST_NORMAL else e_x


@njit(**OPTIONS)
def _exp_near_0(r: Any) -> Any:
    """e^r for |r| <= ln(2) / 2."""
    return ONE + (r + r * r * (E0 + r * (E1 + r * (E2 + r * (E3 + r * E4)))))


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x)."""
    return 1 / (1 + math.exp(-x))


def _sigmoid_float32(x: Any) -> Any:
    return ONE / (ONE + exp(-x))


def normal_cdf_and_density(x: float) -> tuple[float, float]:
    """Phi(x) = erfc(-x / sqrt(2)) / 2 and Phi'(x) = exp(-x^2 / 2) / sqrt(2 pi).

    float32: relative errors below 5e-7 (1 + x^2 / 4), which grow as the rounding of x^2
    does; both, or Phi(x) - 1, are 0 for |x| > 13.2, where they are below 1e-37.
    """
    return 0.5 * math.erfc(-x * SQRT_HALF), math.exp(-0.5 * x * x) * INV_SQRT_2PI


SQRT_HALF = math.sqrt(0.5)
INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
DENSITY_AT_0 = np.float32(INV_SQRT_2PI)

# The upper tail Phi(-a), a >= 0, is e^(-a^2/2) times a polynomial in t = 1/(1 + c a),
# the form of Abramowitz and Stegun 7.1.26. Theirs is good to an absolute 1e-7, this fit
# to a relative 1.7e-7 (1 + a^2 / 4).
T_SCALE = np.float32(0.35)
T1, T2, T3, T4 = map(np.float32, (0.13983422, 0.13613988, 0.14667932, 0.00054204))
T5, T6, T7 = map(np.float32, (0.22164503, -0.19118625, 0.04634585))
HALF_LOG2_E = HALF * LOG2_E
LOWEST_EXPONENT = np.float32(-126)


def _normal_cdf_and_density_float32(x: Any) -> Any:
    gauss = _exp_of_minus_half_square(x)
    t = ONE / (ONE + T_SCALE * abs(x))
    high = T4 + t * (T5 + t * (T6 + t * T7))
    tail = gauss * (t * (T1 + t * (T2 + t * (T3 + t * high))))
    return (tail if x < ZERO else ONE - tail), gauss * DENSITY_AT_0


@njit(**OPTIONS)
def _exp_of_minus_half_square(x: Any) -> Any:
    """As exp_of_nonpositive(-x^2 / 2): x^2 is rounded, so ln 2 in two parts is vain."""
    exponent = -HALF_LOG2_E * x * x
    shifted = exponent + TO_INTEGER
    gauss = _exp_near_0((exponent - (shifted - TO_INTEGER)) * LN2)
    return ZERO if exponent < LOWEST_EXPONENT else gauss * _power_of_two(shifted)


def _overload_by_type(
    function: Callable[..., Any], float32_version: Callable[..., Any]
) -> None:
    def choose_version(x: Any) -> Callable[..., Any]:
        return float32_version if x == types.float32 else function

    overload(function, jit_options=OPTIONS, strict=False)(choose_version)


def _exponent_bits(typing_context: Any, shifted: Any) -> Any:
    """2^n as float32, shifted = n + TO_INTEGER, -126 <= n <= 127: n becomes its bits.

    The shift that takes n to the exponent's place pushes out all other bits.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integer = ir.IntType(32)
        exponent = builder.shl(
            builder.bitcast(args[0], integer), ir.Constant(integer, MANTISSA_BITS)
        )
        bias = ir.Constant(integer, EXPONENT_BIAS << MANTISSA_BITS)
        return builder.bitcast(builder.add(exponent, bias), ir.FloatType())

    return types.float32(types.float32), generate


_power_of_two: Any = intrinsic(_exponent_bits)


_overload_by_type(exp, _exp_float32)
_overload_by_type(exp_of_nonpositive, _exp_of_nonpositive_float32)
_overload_by_type(sigmoid, _sigmoid_float32)
_overload_by_type(normal_cdf_and_density, _normal_cdf_and_density_float32)
