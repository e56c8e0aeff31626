"""Write benchmarks/results/gpu_expected.md: the cost model (`cost.py`) beside the committed rows, and what it expects.

python benchmarks/gpu/expected.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gpu.cost import MEASURED, NEW, RESULTS, ROOT, SLOWER, Ceilings, Design, expected_s
from gpu.log import Row

from cacheblend_cli.model.families import spec_from_config
from cacheblend_cli.model.spec import ModelSpec

TOLERANCE = 0.15
SUFFIX = 64
DEFAULT = "query 0.15"
MODELS = (("llama-3.1-8b", 4096), ("llama-3.1-8b", 16384), ("llama-3.2-1b", 4096))
STEPS: tuple[tuple[str, dict[str, object]], ...] = (
    ("as measured", {}),
    ("look-ups are remembered", {"lookups": False}),
    ("chunks in pinned memory, 4 groups of layers", {"cached": True, "groups": 4}),
    ("one replay a layer, correction and probe in it", {"replays": 1, "graphed": True, "copies": 0}),
    ("`inverse_kernel` in 40 us", {"pivot_s": NEW.pivot_s}),
    ("rows rounded to the nearest tile", {"nearest": True}),
    ("choosing prepared", {"choose_share": NEW.choose_share}),
    ("attention recorded up to layer 18 of 32 (if answers allow it)", {"probed": 19 / 32}),
)


@dataclass(frozen=True)
class Card:
    """A card whose rows are committed."""

    name: str
    ceilings: Ceilings
    rows: list[Row]  # times and loading
    kv_bytes: dict[tuple[str, int], float]  # stored, of a model's prompt

    @classmethod
    def read(cls, path: Path) -> Card:
        found = json.loads(path.read_text(encoding="utf-8"))
        loads = [row for row in found["load"] if row["case"] == "store to pool"]
        times = [row for row in found["times"] if row["case"] != "transformers"]
        sizes = {(row["step"], row["length"]): row["bytes"] for row in loads}
        return cls(found["on"].split(";")[0], Ceilings.of(found["ceilings"]), times + loads, sizes)

    def expected(self, model: str, length: int, case: str, design: Design) -> float:
        size = self.kv_bytes[model, length]
        return expected_s(spec_of(model), self.ceilings, length, SUFFIX, case, size, design, SLOWER[self.name])


def cards() -> list[Card]:
    return [Card.read(path) for path in sorted(RESULTS.glob("gpu-nvidia-*.json"))]


def spec_of(model: str) -> ModelSpec:
    return spec_from_config(json.loads((ROOT / "configs" / f"{model}.json").read_text(encoding="utf-8")))


def compared() -> Iterator[tuple[Card, Row, float]]:
    """Yield each committed row with what the model gives for the code that it was measured with, in seconds."""
    for card in cards():
        for row in card.rows:
            yield card, row, card.expected(row["step"], row["length"], row["case"], MEASURED)


def off(seconds: float, measured: float) -> bool:
    return abs(seconds / measured - 1) > TOLERANCE


def whole(card: Card, model: str, length: int) -> float:
    """Return the time of a full prefill in slices of 2,048 rows or, if that is faster and it has no more, of 4,096."""
    sizes = (2048, 4096) if length <= 4096 else (2048,)
    return min(card.expected(model, length, "full", replace(NEW, slice_rows=size)) for size in sizes)


def steps(card: Card, model: str, length: int) -> list[float]:
    """Return the default's time after each step, in seconds."""
    design, found = MEASURED, []
    for _, changed in STEPS:
        design = replace(design, **changed)  # type: ignore[arg-type]
        found.append(card.expected(model, length, DEFAULT, design))
    return found


def page() -> str:
    return "\n".join([*_introduction(), *_comparison(), *_staircase(), *_new()]) + "\n"


def _introduction() -> Iterator[str]:
    yield "# Expected on a GPU\n"
    yield "**Computed, not measured**, by `benchmarks/gpu/expected.py`, with the cost model of `benchmarks/gpu/cost.py`."
    yield "Host times of launches are measured on a machine without a GPU (`gpu_host.json`) and scaled; `Assumed` in"
    yield "`cost.py` says where every other number is from. Times in milliseconds; chunks of 512 tokens, int7, a question"
    yield "of 64 tokens, a warm process."


def _comparison() -> Iterator[str]:
    found = list(compared())
    wrong = sum(off(seconds, row["seconds"]) for _, row, seconds in found)
    yield "\n## The model beside the committed rows\n"
    yield f"{len(found) - wrong} of {len(found)} rows are within {TOLERANCE:.0%}.\n"
    yield "| card | model | tokens | case | measured | computed | |"
    yield "|" + "---|" * 7
    for card, row, seconds in found:
        error = f"{seconds / row['seconds'] - 1:+.0%}"
        error = f"**{error}**" if off(seconds, row["seconds"]) else error
        cells = (card.name, row["step"], row["length"], row["case"], _ms(row["seconds"]), _ms(seconds), error)
        yield f"| {' | '.join(map(str, cells))} |"


def _staircase() -> Iterator[str]:
    yield "\n## Steps from the code of these rows to today's\n"
    yield f"Time to the first token of `{DEFAULT}` from stored KV, each step with the ones above it.\n"
    columns = [(card, *model) for card in cards() for model in MODELS]
    yield f"| | {' | '.join(f'{c.name.split()[1]} {m[6:]} {n}' for c, m, n in columns)} |"
    yield "|" + "---|" * (1 + len(columns))
    found = [steps(*column) for column in columns]
    for number, (what, _) in enumerate(STEPS):
        yield f"| {what} | {' | '.join(_ms(one[number]) for one in found)} |"
    yield f"| full prefill | {' | '.join(_ms(whole(*column)) for column in columns)} |"


def _new() -> Iterator[str]:
    yield "\n## Today's code\n"
    yield "Without the last step. In brackets: how many times as fast as a full prefill.\n"
    yield "| card | model | tokens | full prefill | case | KV in pinned memory | KV in the pool |"
    yield "|" + "---|" * 7
    for card in cards():
        for model, length in MODELS:
            full = whole(card, model, length)
            for case in (f"{selector} 0.15{more}" for selector in ("query", "hkvd") for more in ("", " uncorrected")):
                loaded = card.expected(model, length, case, NEW)
                pool = card.expected(model, length, f"{case} in the pool", NEW)
                cells = (
                    card.name,
                    model,
                    length,
                    _ms(full),
                    case,
                    *(f"{_ms(s)} ({full / s:.1f})" for s in (loaded, pool)),
                )
                yield f"| {' | '.join(map(str, cells))} |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


if __name__ == "__main__":
    (RESULTS / "gpu_expected.md").write_text(page(), encoding="utf-8")
    print(page(), end="")
