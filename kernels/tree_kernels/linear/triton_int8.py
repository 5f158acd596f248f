"""The two numbers in a word of `Int8Weight`, converted to the dtype of the product.

To bfloat16 by four instructions for two of them. A byte b, which stands for b - 128, becomes the low byte of 0x43: of
128 + b where b < 128, and else of 256 + 2 * (b - 128), since a bfloat16 has seven bits behind its first. Less 256 that
is b - 128 or twice that, whichever is larger, and half of it is the other: the smaller of both is the number.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Two bfloat16 of a kind in a register: 1, -256, 0.5, -128.
_TWICE = tl.constexpr(
    "{ .reg .b32 pair, whole, halved, one, half, less, half_less; mov.b32 one, 0x3F803F80; mov.b32 less, 0xC380C380; "
    "mov.b32 half, 0x3F003F00; mov.b32 half_less, 0xC300C300; prmt.b32 pair, $1, 0x43434343, "
)
_NUMBERS = tl.constexpr(
    "; fma.rn.bf16x2 whole, pair, one, less; fma.rn.bf16x2 halved, pair, half, half_less; "
    "min.bf16x2 $0, whole, halved; }"
)
# Which bytes of two words, and above each 0x43.
_LOW = tl.constexpr(_TWICE.value + "0x4240" + _NUMBERS.value)
_HIGH = tl.constexpr(_TWICE.value + "0x4341" + _NUMBERS.value)


@triton.jit
def low_numbers(words, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers in the low bytes of words."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_LOW, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    return ((words & 255) - 128).to(dtype)


@triton.jit
def high_numbers(words, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers in the high bytes of words."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_HIGH, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    return (((words >> 8) & 255) - 128).to(dtype)
