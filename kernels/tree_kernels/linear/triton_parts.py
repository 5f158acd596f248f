"""Parts of kernels that differ between families: activations, whole norms, and which numbers of a head rotate together.

Each is chosen when a kernel is compiled, so that none costs the others anything.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(number, parameters, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """`forms.Activation` of fp32 numbers; `parameters` are xIELU's and not read for others."""
    if KIND == "none":
        return number
    elif KIND == "silu":
        return number / (1.0 + tl.exp(-number))
    elif KIND == "relu":
        return tl.maximum(number, 0.0)
    elif KIND == "relu2":
        positive = tl.maximum(number, 0.0)
        return positive * positive
    elif KIND == "quick_gelu":
        return number / (1.0 + tl.exp(-1.702 * number))
    elif KIND == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-number))
    elif KIND == "softplus":
        # So that no power overflows.
        return tl.maximum(number, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(number)))
    elif KIND == "gelu":
        return 0.5 * number * (1.0 + tl.erf(number * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(u)) / 2 is a sigmoid of 2u.
        twice = 1.5957691216057308 * (number + 0.044715 * number * number * number)
        return number / (1.0 + tl.exp(-twice))
    else:
        tl.static_assert(KIND == "xielu", "an activation that has no kernel")
        positive, negative = tl.load(parameters), tl.load(parameters + 1)
        beta, epsilon = tl.load(parameters + 2), tl.load(parameters + 3)
        below = (tl.exp(tl.minimum(number, epsilon)) - 1.0 - number) * negative
        return tl.where(number > 0.0, positive * number * number, below) + beta * number


@triton.jit
def gated(  # type: ignore[no-untyped-def]
    gate, up, parameters, KIND: tl.constexpr, LIMIT: tl.constexpr, LIMITS_ACTIVATED: tl.constexpr, OFFSET: tl.constexpr
):
    """`forms.GateForm` of fp32 numbers; LIMIT and OFFSET are 0 where there is none."""
    if LIMIT > 0 and not LIMITS_ACTIVATED:
        gate = tl.minimum(gate, LIMIT)
    gate = activated(gate, parameters, KIND)
    if LIMIT > 0:
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        if LIMITS_ACTIVATED:
            gate = tl.minimum(gate, LIMIT)
    return gate * (up + OFFSET)


@triton.jit
def load_wide(pointer, column, inside):  # type: ignore[no-untyped-def]
    """[BLOCK] fp32 numbers, zeros outside."""
    return tl.load(pointer + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_norm(weight, bias, column, inside, HAS_BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK] fp32 weight and bias of a norm; the weight again where it has no bias."""
    loaded = load_wide(weight, column, inside)
    shift = loaded
    if HAS_BIAS:
        shift = load_wide(bias, column, inside)
    return loaded, shift


@triton.jit
def whole_norm(  # type: ignore[no-untyped-def]
    read, inside, weight, bias, epsilon, WIDTH: tl.constexpr, CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """[BLOCK] fp32: the norm of a row, of which `inside` are there; with loaded weight and bias."""
    if CENTERED:
        read = tl.where(inside, read - tl.sum(read, 0) / WIDTH, 0.0)
    read = read * tl.rsqrt(tl.sum(read * read, 0) / WIDTH + epsilon) * weight
    if HAS_BIAS:
        read += bias
    return read


@triton.jit
def pair_column(pair, WIDTH: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The column in its head of a pair's first number. The first ROTARY / 2 pairs are those that rotate; the rest is
    paired for the kernels' sake."""
    if ROTARY == WIDTH and not INTERLEAVED:
        return pair
    else:
        turning: tl.constexpr = ROTARY // 2
        return tl.where(pair < turning, (2 if INTERLEAVED else 1) * pair, pair + (ROTARY - turning))


@triton.jit
def pair_distance(pair, WIDTH: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many columns behind a pair's first number its second is."""
    if ROTARY == WIDTH and not INTERLEAVED:
        return WIDTH // 2
    else:
        turning: tl.constexpr = ROTARY // 2
        return tl.where(pair < turning, 1 if INTERLEAVED else turning, (WIDTH - ROTARY) // 2)


@triton.jit
def rotated(  # type: ignore[no-untyped-def]
    left, right, cosines, sines, row, pair, mask, WIDTH: tl.constexpr, ROTARY: tl.constexpr
):
    """Rotary embedding of pairs of numbers of a head, as `HeadRows` has the angles of the first ROTARY / 2 of them."""
    half: tl.constexpr = ROTARY // 2
    at = row * ROTARY + pair
    if ROTARY != WIDTH:
        mask = mask & (pair < half)
    first_cosine = tl.load(cosines + at, mask=mask, other=0.0).to(tl.float32)
    first_sine = tl.load(sines + at, mask=mask, other=0.0).to(tl.float32)
    second_cosine = tl.load(cosines + at + half, mask=mask, other=0.0).to(tl.float32)
    second_sine = tl.load(sines + at + half, mask=mask, other=0.0).to(tl.float32)
    first, second = left * first_cosine - right * first_sine, right * second_cosine + left * second_sine
    if ROTARY != WIDTH:
        # Multiplying with cosines of 1 and sines of 0 would make NaN of infinite ones.
        first, second = tl.where(pair < half, first, left), tl.where(pair < half, second, right)
    return first, second
