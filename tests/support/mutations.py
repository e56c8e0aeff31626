"""Random edits of bytes."""

from __future__ import annotations

import random

_WORDS = (
    b"\0" * 8, b"\xff" * 8, b"../", b"/", b'"', b"{" * 50, b"[" * 2000, b"1e999", b"-1", b"NaN", b"9" * 5000, b"\n", b"null",
)  # fmt: skip


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Make a few random edits: bits, runs of bytes, cuts, repetitions, and words that are hard to parse."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, kind = rng.randrange(max(1, len(out))), rng.randrange(6)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at : at + rng.randint(0, 40)] = rng.randbytes(rng.randint(0, 40))
        elif kind == 2:
            del out[at : at + rng.choice((1, 511, 512, 4000))]
        elif kind == 3:
            out[at:at] = out[at : at + rng.choice((1, 512, 1024, 3000))]
        elif kind == 4:
            out[at:at] = rng.choice(_WORDS)
        else:
            del out[at:]
    return bytes(out)
