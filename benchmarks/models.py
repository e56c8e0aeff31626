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
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import hub_families  # noqa: E402
import hub_generic  # noqa: E402
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
- decoding: greedy tokens are those of transformers' `generate`;
- time: of a full prefill, of what transformers takes for it (below 1 is faster), both in float32 at a common small shape.
{speed}
| model_type | configurations | full | blend 1.0 | blend .15 | repair | decoding | time |
|---|---|---|---|---|---|---|---|
"""
SPEED = ROOT / "benchmarks" / "results" / "model_speed.json"


GENERIC = """## Any other decoder: the generic path

A model_type without a file in `model/families/` runs on transformers' own layers, if transformers knows it, its attention
goes through `AttentionInterface`, and its layers turn out to be of a kind that can be blended. It is exact and slower: a
layer is run twice, once for what it projects and once for what it makes of attention's output, and transformers is
imported. `models show`, `doctor` and `ask --explain` say "generic path". GGUF, quantised checkpoints and `--weight-dtype`
are not for it. No code of a model's own is run.

Nothing of it is believed before it is seen. When such a model is loaded, it is refused, with the reason, unless (the last of
these is looked at once for a model and versions, and remembered)

- its layers are one list, called one after the other with rows, RoPE's cos and sin, and a mask; nothing happens between
  them, nothing that depends on positions or neighbours before them, and behind them only what concerns a row alone;
- every layer calls attention once, with heads of the same number and size in all layers;
- the mask's own rule, asked at positions over the whole context, is causal, with or without a window;
- RoPE has one of the two usual forms, over all or the first channels of a head, and q and k stand at positions up to the
  context's last as `rope_parameters` say; norms behind RoPE, and RoPE that depends on the prompt's length, are refused;
- no layer chooses which keys it sees;
- over random tokens, each layer in float32 gives what transformers' own layer gives with its own attention: every row at
  once; some rows over the KV of the others; both at the first positions and at far ones. A convolution, a shift or a state
  over tokens shows there, whatever its name.

`models check` compares the whole of a model, over a longer prompt.

"""


def main() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    transformers.utils.logging.disable_progress_bar()
    begin = time.perf_counter()
    found: dict[str, list[Parity]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        documents = write_documents(Path(folder) / "documents")
        for number, model in enumerate([*hub_models.RUN, *hub_families.RUN, *hub_generic.RUN]):
            path = Path(folder) / str(number)
            parity = compare(model, path, documents)
            config = json.loads((path / "model" / "config.json").read_text(encoding="utf-8"))
            found[_family(config)].append(parity)
            print(f"{model.name}: {parity}", file=sys.stderr)
    missing = {*FAMILIES, *WRAPPERS} - set(found)
    assert {f"{name}_text" for name in WRAPPERS} >= missing, f"no configuration of {missing}"
    tokens = f"{min(_all(found, 'num_tokens'))} to {max(_all(found, 'num_tokens'))}"
    text = HEAD.format(tokens=tokens, speed=_speed_told())
    generic = {name for name in found if name not in FAMILIES and name not in WRAPPERS}
    text += "".join(_row(name, found[name]) for name in sorted(set(found) - generic))
    text += "".join(_row(name, found[name], "generic path") for name in sorted(generic))
    every = [parity for family in found.values() for parity in family]
    text += _row("all", every) + "\n"
    text += (
        f"{len(every)} configurations of {len(found)} model_types in {time.perf_counter() - begin:.0f} s, one thread; "
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, {platform.machine()}.\n\n"
    )
    text += GENERIC + _unsupported()
    (ROOT / "docs" / "models.md").write_text(text, encoding="utf-8")


def _family(config: dict[str, object]) -> str:
    if config.get("model_type") == "mistral" and "layer_types" in config:
        return "ministral"
    return str(config.get("model_type") or "llama")


def _row(name: str, family: list[Parity], path: str = "") -> str:
    decoded = sum(parity.same_answer for parity in family)
    chosen = sum(parity.same_choice for parity in family)
    cells = [
        (f"`{name}`" if name != "all" else "all") + (f", {path}" if path else ""),
        str(len(family)),
        *(f"{max(getattr(p, part) for p in family):.1e}" for part in ("full", "everything")),
        f"{max(p.some for p in family):.1e}" + ("" if chosen == len(family) else f" ({chosen} chose the same)"),
        f"{min(p.repair for p in family):.1e}",
        "all" if decoded == len(family) else f"{decoded} of {len(family)}",
        _time(name),
    ]
    return f"| {' | '.join(cells)} |\n"


def _time(name: str) -> str:
    """Of the runs of benchmarks/model_speed.py; empty where there is none."""
    measured = _speeds().get("models", {}).get(name)
    return f"{measured['ours_s'] / measured['theirs_s']:.2f}" if measured else ""


def _speed_told() -> str:
    speeds = _speeds()
    if not speeds:
        return ""
    h, shape = speeds["hardware"], speeds["shape"]
    return (
        f"  {speeds['tokens']} tokens, {shape['hidden_size']} wide, {h['cpu']}, {h['threads']} threads; "
        "`python benchmarks/model_speed.py`.\n"
    )


def _speeds() -> dict[str, Any]:
    return json.loads(SPEED.read_text(encoding="utf-8")) if SPEED.is_file() else {}


def _all(found: dict[str, list[Parity]], name: str) -> list[int]:
    return [getattr(parity, name) for family in found.values() for parity in family]


def _unsupported() -> str:
    reasons: dict[str, list[str]] = defaultdict(list)
    for model_type, reason in UNSUPPORTED.items():
        reasons[reason].append(f"`{model_type}`")
    lines = [f"- {reason}: {', '.join(sorted(types))}\n" for reason, types in reasons.items()]
    return (
        "## Refused by name\n\nA model_type that is neither here nor above, and that transformers does not know, is unknown, and said to be.\n\n"
        + "".join(lines)
    )


if __name__ == "__main__":
    main()
