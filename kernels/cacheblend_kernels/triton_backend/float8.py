"""float8_e4m3fn (arXiv 2209.05433) by bit operations: every architecture reads and writes it identically.

Sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities; both all-ones codes are NaN; largest number 448.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_to_fp32(byte):
    """Convert uint8 codes to fp32, exactly: fp16 holds the same bits as numbers 2^8 times smaller."""
    bits = byte.to(tl.uint16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    wide = half.to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), wide)


@triton.jit
def fp32_to_e4m3(x):
    """Convert fp32 to uint8 codes, rounded to nearest even; beyond 448 it saturates. NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    size_bits = size.to(tl.uint32, bitcast=True)
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - 960  # 8 codes per exponent, bias 127 - 7
    # Below 2^-6 codes are multiples of 2^-9, the spacing of fp32 at 2^14: the sum rounds to them.
    subnormal = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, subnormal, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((bits >> 31) << 7)).to(tl.uint8)
