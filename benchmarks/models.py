"""Compare every model family with transformers and with a reference implementation of blending; fill in
results/models.md and docs/models.md.

    python benchmarks/models.py

Runs the configurations of tests/model/test_parity.py: small checkpoints with random weights and the files of models on
the hub. The column of times is that of results/model_speed.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
import transformers
from machine import RESULTS, ROOT, fill, read_result

sys.path.insert(0, str(ROOT / "tests" / "support"))

import hub_families
import hub_generic
import hub_models
from parity import Parity, compare, write_documents

from cacheblend_cli.model.families import FAMILIES, WRAPPERS

PARITY, PAGE = RESULTS / "models.md", ROOT / "docs" / "models.md"
SPEEDS = read_result(RESULTS / "model_speed.json")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    table = parity_table()
    fill(PARITY, table=table)
    fill(PAGE, families=families(table))


def families(table: str) -> str:
    """Return the model_types of a parity table, those on the generic path apart."""
    names = {path: re.findall(rf"^\| (`\S+`){path} \|", table, re.MULTILINE) for path in ("", ", generic path")}
    own, generic = (", ".join(found) for found in names.values())
    return f"- own layers: {own}\n- [generic path](#other-decoders-the-generic-path): {generic}\n"


def parity_table() -> str:
    """Run every configuration and return a row per model_type: the largest differences over its configurations."""
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
    inside = {f"{name}_text" for name in WRAPPERS} | {name for name in WRAPPERS if WRAPPERS[name].text in found}
    assert inside >= missing, f"no configuration of {missing}"
    generic = {name for name in found if name not in FAMILIES and name not in WRAPPERS}
    every = [parity for family in found.values() for parity in family]
    text = "| model_type | configurations | full | blend 1.0 | blend .15 | repair | decoding | time |\n|---|---|---|---|---|---|---|---|\n"
    text += "".join(_row(name, found[name]) for name in sorted(set(found) - generic))
    text += "".join(_row(name, found[name], "generic path") for name in sorted(generic))
    text += _row("all", every) + "\n"
    text += (
        f"{len(every)} configurations of {len(found)} model_types in {time.perf_counter() - begin:.0f} s, one thread, prompts of "
        f"{min(_all(found, 'num_tokens'))} to {max(_all(found, 'num_tokens'))} tokens; torch {torch.__version__.split('+')[0]}, "
        f"transformers {transformers.__version__}, {platform.machine()}.{_speed_setup()}\n"
    )
    return text


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
    """Our share of transformers' time for a full prefill; empty where it was not measured."""
    measured = SPEEDS["models"].get(name)
    return f"{measured['ours_s'] / measured['theirs_s']:.2f}" if measured else ""


def _speed_setup() -> str:
    h, shape = SPEEDS["hardware"], SPEEDS["shape"]
    return f" Time: {SPEEDS['tokens']} tokens, hidden size {shape['hidden_size']}, {h['cpu']}, {h['threads']} threads."


def _all(found: dict[str, list[Parity]], name: str) -> list[int]:
    return [getattr(parity, name) for family in found.values() for parity in family]


if __name__ == "__main__":
    main()
