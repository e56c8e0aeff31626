"""Write benchmarks/results/gpu_expected.md: the cost model (`cost.py`) beside the committed rows, and what it expects.

cd benchmarks; python -m gpu.expected
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

TOLERANCE, SUFFIX = 0.15, 64
CASES = ("query 0.15", "query 0.15 in the pool", "hkvd 0.15")
MODELS = (("llama-3.1-8b", 4096), ("llama-3.1-8b", 16384), ("llama-3.2-1b", 4096))
STEPS: tuple[tuple[str, dict[str, object]], ...] = (
    ("as measured", {}),
    ("look-ups are remembered", {"lookups": False}),
    ("chunks in pinned memory, 4 groups of layers", {"cached": True, "groups": 4, "setup_share": NEW.setup_share}),
    ("one replay a layer, correction and probe in it", {"replays": 1, "graphed": True, "copies": 0}),
    ("`inverse_kernel` in half the time", {"pivot_s": NEW.pivot_s}),
    ("rows rounded to the nearest tile", {"nearest": True}),
    ("choosing prepared", {"choose_share": NEW.choose_share}),
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

    def full(self, model: str, length: int) -> float:
        """Return a full prefill's time in slices of 2,048 rows or, if it has no more and is faster, in one of 4,096."""
        sizes = (2048, 4096) if length <= 4096 else (2048,)
        return min(self.expected(model, length, "full", replace(NEW, slice_rows=size)) for size in sizes)

    def steps(self, model: str, length: int) -> list[float]:
        """Return the time of the default after each step."""
        design, found = MEASURED, []
        for _, changed in STEPS:
            design = replace(design, **changed)  # type: ignore[arg-type]
            found.append(self.expected(model, length, CASES[0], design))
        return found


def cards() -> list[Card]:
    return [Card.read(path) for path in sorted(RESULTS.glob("gpu-nvidia-*.json"))]


def spec_of(model: str) -> ModelSpec:
    return spec_from_config(json.loads((ROOT / "configs" / f"{model}.json").read_text(encoding="utf-8")))


def compared() -> Iterator[tuple[Card, Row, float]]:
    """Yield each committed row with the seconds that the model gives for the code it was measured with."""
    for card in cards():
        for row in card.rows:
            yield card, row, card.expected(row["step"], row["length"], row["case"], MEASURED)


def off(seconds: float, measured: float) -> bool:
    return abs(seconds / measured - 1) > TOLERANCE


def page() -> str:
    return "\n".join([*_comparison(), *_steps()]) + "\n"


def _comparison() -> Iterator[str]:
    found = list(compared())
    wrong = sum(off(seconds, row["seconds"]) for _, row, seconds in found)
    yield "# Expected on a GPU\n"
    yield "**Computed, not measured**, by `benchmarks/gpu/expected.py`, with the cost model of `benchmarks/gpu/cost.py`."
    yield "Host times of launches are measured on a machine without a GPU (`gpu_host.json`) and scaled; `Assumed` in"
    yield "`cost.py` says where every other number is from. Times in milliseconds; chunks of 512 tokens, int7, a question"
    yield "of 64 tokens, a warm process."
    yield "\n## The model beside the committed rows\n"
    yield f"{len(found) - wrong} of {len(found)} rows are within {TOLERANCE:.0%}.\n"
    yield from _head("card", "model", "tokens", "case", "measured", "computed", "")
    for card, row, seconds in found:
        error = f"{seconds / row['seconds'] - 1:+.0%}"
        error = f"**{error}**" if off(seconds, row["seconds"]) else error
        yield _row(card.name, row["step"], row["length"], row["case"], row["seconds"], seconds, error)


def _steps() -> Iterator[str]:
    yield "\n## From the code of these rows to today's\n"
    yield f"Time to the first token of `{CASES[0]}` with its KV from the store. Each step has those above it; what is below"
    yield "them is without the last one.\n"
    columns = [(card, *model) for card in cards() for model in MODELS]
    yield from _head("", *(f"{card.name.split()[1]}, {model[6:]}, {length}" for card, model, length in columns))
    found = [card.steps(*rest) for card, *rest in columns]
    for number, (what, _) in enumerate(STEPS):
        yield _row(what, *(one[number] for one in found))
    yield _row("full prefill", *(card.full(*rest) for card, *rest in columns))
    for case in CASES[1:]:
        yield _row(f"`{case}`", *(card.expected(*rest, case, NEW) for card, *rest in columns))


def _head(*cells: str) -> Iterator[str]:
    yield _row(*cells)
    yield "|" + "---|" * len(cells)


def _row(*cells: str | float) -> str:
    return f"| {' | '.join(f'{cell * 1e3:.1f}' if isinstance(cell, float) else str(cell) for cell in cells)} |"


if __name__ == "__main__":
    (RESULTS / "gpu_expected.md").write_text(page(), encoding="utf-8")
    print(page(), end="")
