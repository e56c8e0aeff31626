"""How fast each family's full prefill is beside transformers', at a common small shape.

    python benchmarks/model_speed.py [--rounds 5] [--out benchmarks/results/model_speed.json]
    python benchmarks/models.py     # puts it into docs/models.md

The first configuration of each model_type in the parity suite that can be written in the common shape: random weights,
float32, one prompt, both in one process and in turn; medians after a warm-up. A difference of logits that rounding does not
explain drops the configuration.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import hub_families  # noqa: E402
import hub_generic  # noqa: E402
import hub_models  # noqa: E402
from hub_models import HubModel  # noqa: E402
from models import _family  # noqa: E402
from prefill import hardware  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: E402

from cacheblend_cli.api import BlendConfig, Engine, EngineConfig, Question  # noqa: E402
from cacheblend_cli.engine.prefill import prefill  # noqa: E402
from cacheblend_cli.engine.request import resolve  # noqa: E402
from cacheblend_cli.evaluation.speed import ordinary_ids, random_ids  # noqa: E402

TOKENS = 480
SHAPE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}  # fmt: skip
WIDER = {"head_dim": 64, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
EXPLAINED = 1e-3  # of the largest logit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/model_speed.json")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found: dict[str, dict[str, Any]] = {}
    seen = set[Any]()
    with tempfile.TemporaryDirectory() as folder:
        for number, model in enumerate([*hub_models.RUN, *hub_families.RUN, *hub_generic.RUN]):
            path = Path(folder) / str(number)
            if model.config in seen:
                continue  # the class has a configuration that was measured
            try:
                wide(model).write(path)
                kind = _family(json.loads((path / "config.json").read_text(encoding="utf-8")))
                if kind in found:
                    continue
                measured = measure(path, arguments.rounds)
            except Exception as error:  # of whatever library: this configuration has no such shape
                print(f"{model.name}: left out, {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr)
                continue
            if measured["difference"] > EXPLAINED:
                print(f"{model.name}: left out, {measured['difference']:.1g} apart", file=sys.stderr)
                continue
            if model.config not in (hub_models.LlamaConfig, hub_models.MistralConfig):  # of several model_types
                seen.add(model.config)
            found[kind] = {"configuration": model.name, **measured}
            print(f"{kind}: {measured['ours_s']:.3f} s, transformers {measured['theirs_s']:.3f} s", file=sys.stderr)
    result = {"hardware": hardware(), "tokens": TOKENS, "shape": SHAPE, "models": dict(sorted(found.items()))}
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def wide(model: HubModel) -> HubModel:
    """The same configuration in the common shape."""
    own: dict[str, Any] = {name: size for name, size in WIDER.items() if name in model.shape}
    rope = model.shape.get("rope_parameters", {})
    if "mrope_section" in rope:  # a share of the frequencies each
        first, second, third = rope["mrope_section"]
        step = WIDER["head_dim"] // 2 // (first + second + third)
        own["rope_parameters"] = rope | {"mrope_section": [first * step, second * step, third * step]}
    edit = {name: WIDER.get(name, value) if type(value) is int else value for name, value in model.edit.items()}
    return replace(model, shape=model.shape | SHAPE | own, edit=edit, dtype=torch.float32)


@torch.inference_mode()
def measure(path: Path, rounds: int) -> dict[str, float]:
    """Median seconds of a full prefill, ours and transformers', and how far apart the last logits are."""
    engine = Engine.load(EngineConfig(model=str(path), dtype="float32", prompt="{chunks}\n\n{question}"))
    runtime, ordinary = engine.runtime, ordinary_ids(engine.model)
    ids = random_ids(ordinary, TOKENS, torch.Generator().manual_seed(1))
    request = resolve(runtime, None, Question("", (), BlendConfig(mode="full")), ids)
    plan = request.plan.token_ids
    sees = "vision_config" in json.loads((path / "config.json").read_text(encoding="utf-8"))
    auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    theirs = auto.from_pretrained(path, dtype=torch.float32).eval()
    row = torch.tensor([list(plan)])

    def ours_once() -> torch.Tensor:
        done = prefill(runtime, request)
        logits = done.logits.float().flatten()
        done.sequence.release()
        return logits

    def theirs_once() -> torch.Tensor:
        last: torch.Tensor = theirs(row, attention_mask=torch.ones_like(row), logits_to_keep=1).logits[0, -1].float()
        return last

    seconds: dict[str, list[float]] = {"ours_s": [], "theirs_s": []}
    for number in range(rounds + 1):
        for name, once in (("ours_s", ours_once), ("theirs_s", theirs_once)):
            start = time.perf_counter()
            once()
            if number:
                seconds[name].append(time.perf_counter() - start)
    reference = theirs_once()
    apart = float((ours_once() - reference).abs().max() / reference.abs().max())
    return {name: statistics.median(values) for name, values in seconds.items()} | {"difference": apart}


if __name__ == "__main__":
    main()
