"""Every family beside transformers and beside a second implementation of blending: writes docs/models.md.

    python benchmarks/models.py

It runs the configurations of tests/model/test_parity.py: random weights in small, as models on the hub have their files.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import hub_families  # noqa: E402
import hub_models  # noqa: E402
from parity import Parity, compare, write_documents  # noqa: E402

from cacheblend_cli.model.families import FAMILIES, WRAPPERS  # noqa: E402
from cacheblend_cli.model.families.unsupported import UNSUPPORTED  # noqa: E402

HEAD = """# Models

Which families load, and how far each is from transformers. Written by `python benchmarks/models.py`, which runs what
`tests/model/test_parity.py` asserts. Every configuration is a checkpoint with random weights in small, with the files and
fields of a model on the hub, in {tokens} tokens of prompt. The engine computes in float32, transformers in float64; a
difference is the largest of any logit.

- full: a full prefill and transformers, at every position;
- blend 1.0: blending with a recompute ratio of 1 and the full prefill, over the question;
- blend .15: blending with a ratio of .15 (`hkvd`) and a second implementation on transformers' own layers, over the question,
  which recomputes the same tokens;
- repair: how far that is from a full prefill, at least: what a difference is to be held against;
- decoding: greedy tokens are those of transformers' `generate`.

| model_type | configurations | full | blend 1.0 | blend .15 | repair | decoding |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    transformers.utils.logging.disable_progress_bar()
    begin = time.perf_counter()
    found: dict[str, list[Parity]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        documents = write_documents(Path(folder) / "documents")
        for number, model in enumerate([*hub_models.RUN, *hub_families.RUN]):
            path = Path(folder) / str(number)
            parity = compare(model, path, documents)
            config = json.loads((path / "model" / "config.json").read_text(encoding="utf-8"))
            found[_family(config)].append(parity)
            print(f"{model.name}: {parity}", file=sys.stderr)
    missing = {*FAMILIES, *WRAPPERS} - set(found)
    assert {f"{name}_text" for name in WRAPPERS} >= missing, f"no configuration of {missing}"
    text = HEAD.format(tokens=f"{min(_all(found, 'num_tokens'))} to {max(_all(found, 'num_tokens'))}")
    text += "".join(_row(name, found[name]) for name in sorted(found))
    every = [parity for family in found.values() for parity in family]
    text += _row("all", every) + "\n"
    text += (
        f"{len(every)} configurations of {len(found)} model_types in {time.perf_counter() - begin:.0f} s, one thread; "
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, {platform.machine()}.\n\n"
    )
    text += _unsupported()
    (ROOT / "docs" / "models.md").write_text(text, encoding="utf-8")


def _family(config: dict[str, object]) -> str:
    if config.get("model_type") == "mistral" and "layer_types" in config:
        return "ministral"
    return str(config.get("model_type") or "llama")


def _row(name: str, family: list[Parity]) -> str:
    decoded = sum(parity.same_answer for parity in family)
    chosen = sum(parity.same_choice for parity in family)
    cells = [
        f"`{name}`" if name != "all" else "all",
        str(len(family)),
        *(f"{max(getattr(p, part) for p in family):.1e}" for part in ("full", "everything")),
        f"{max(p.some for p in family):.1e}" + ("" if chosen == len(family) else f" ({chosen} chose the same)"),
        f"{min(p.repair for p in family):.1e}",
        "all" if decoded == len(family) else f"{decoded} of {len(family)}",
    ]
    return f"| {' | '.join(cells)} |\n"


def _all(found: dict[str, list[Parity]], name: str) -> list[int]:
    return [getattr(parity, name) for family in found.values() for parity in family]


def _unsupported() -> str:
    reasons: dict[str, list[str]] = defaultdict(list)
    for model_type, reason in UNSUPPORTED.items():
        reasons[reason].append(f"`{model_type}`")
    lines = [f"- {reason}: {', '.join(sorted(types))}\n" for reason, types in reasons.items()]
    return "## Refused by name\n\nAny other model_type is unknown, and said to be.\n\n" + "".join(lines)


if __name__ == "__main__":
    main()
