"""What a model computes in: first token and decoding in float32, bfloat16 and with int8 weights, and how far the answers are.

    python benchmarks/precision.py [--rounds 5] [--config configs/qwen2.5-0.5b.json] [--only speed,fidelity]

Speed: random weights in the config's shape, 2,048 chunk tokens in 8 chunks and a question of 32, every precision in turn in
one process; decoding 64 tokens behind that prompt. Fidelity: SmolLM2-135M-Instruct over the handbook's pages, whose tokens it is
given, against itself in float32. Writes benchmarks/results/precision.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cacheblend_store import ChunkStore
from prefill import CHUNK_TOKENS, CHUNKS, SUFFIX_TOKENS, hardware, write_checkpoint

from cacheblend_cli.demo import handbook_dir
from cacheblend_cli.engine.config import BlendConfig, EngineConfig
from cacheblend_cli.engine.prefill import prefill
from cacheblend_cli.engine.request import Question, resolve
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.sampling import SamplingParams
from cacheblend_cli.evaluation.speed import Layout, SpeedPrompt, in_turn, ordinary_ids, random_ids
from cacheblend_cli.model.decoder import Decoder, DecoderLayer
from cacheblend_cli.model.loading import Precision, load_model, resolve_model
from cacheblend_cli.model.named import SMOLLM2

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "precision.json"
CPU = torch.device("cpu")
PRECISIONS = {
    "float32": Precision("float32"),
    "bfloat16": Precision("bfloat16"),
    "int8 weights": Precision("bfloat16", "int8"),
}
BLENDS = {
    "full": BlendConfig(mode="full"),
    "query .15": BlendConfig(selector="query", ratio=0.15),
    "query .05": BlendConfig(selector="query", ratio=0.05),
    "reuse": BlendConfig(mode="reuse"),
}
DECODED = 64
TEXT_TOKENS = 1500


def speed(config: Path, rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    """Medians: seconds to the first token by blend, and tokens a second."""
    checkpoint = write_checkpoint(folder / "model", config)
    stores, cases = [], dict[str, Callable[[], float]]()
    found: dict[str, dict[str, float]] = {}
    for name, precision in PRECISIONS.items():
        runtime = Runtime(load_model(checkpoint, "bench", CPU, precision, "auto"), EngineConfig())
        found[name] = {"weights_mib": _weight_bytes(runtime.decoder) / 2**20}
        generator, ordinary = torch.Generator().manual_seed(1), ordinary_ids(runtime.model)
        ids = tuple(random_ids(ordinary, CHUNK_TOKENS, generator) for _ in range(CHUNKS))
        stores.append(ChunkStore.open(folder / name, mode="write"))
        layout = Layout(ids, random_ids(ordinary, SUFFIX_TOKENS, generator))
        prompt = SpeedPrompt.stored(runtime, stores[-1], layout, DECODED)
        for blend, wanted in BLENDS.items():
            cases[f"{name}|{blend}"] = partial(_seconds, prompt, wanted)
        cases[f"{name}|decode"] = partial(prompt.decode, DECODED)
    for case, values in in_turn(cases, rounds).items():
        name, what = case.split("|")
        found[name][what] = statistics.median(values)
    for store in stores:
        store.close()
    return found


def _weight_bytes(decoder: Decoder) -> int:
    """Of the embedding, the head and the products of the layers, as they are kept."""
    held = [decoder._head, *(product for layer in decoder.layers for product in _products(layer))]
    return sum(p.num_bytes for p in held) + decoder.embedding.numel() * decoder.embedding.itemsize


def _products(layer: DecoderLayer) -> list[Any]:
    return [layer._qkv.first, layer._qkv.rest, layer._o, layer.mlp._up, layer.mlp._down]


def _seconds(prompt: SpeedPrompt, blend: BlendConfig) -> float:
    return prompt.first_token(blend).seconds


@torch.inference_mode()
def fidelity() -> dict[str, dict[str, float]]:
    """Of each precision: KL from float32's next-token distribution, nats a token, and how often the first choice is its."""
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted(handbook_dir().glob("*.md")))
    logits = {}
    for name, precision in PRECISIONS.items():
        model = load_model(resolve_model(SMOLLM2), SMOLLM2, CPU, precision, "auto")
        ids = model.tokenizer.encode_text(text)[:TEXT_TOKENS]
        logits[name] = all_logits(Runtime(model, EngineConfig()), ids)
    reference = logits["float32"].log_softmax(-1)
    found = {}
    for name, own in logits.items():
        kl = (reference.exp() * (reference - own.log_softmax(-1))).sum(-1)
        agree = own.argmax(-1) == reference.argmax(-1)
        found[name] = {"kl": float(kl.mean()), "top1": float(agree.float().mean()), "tokens": len(ids)}
    return found


def all_logits(runtime: Runtime, ids: list[int]) -> torch.Tensor:
    """[num_tokens, vocab_size] fp32 of a full prefill."""
    request = resolve(
        runtime, None, Question("", [], BlendConfig(mode="full"), SamplingParams(max_tokens=1)), tuple(ids)
    )
    done = prefill(runtime, request, output_positions=lambda plan: torch.arange(plan.num_tokens))
    done.sequence.release()
    return done.result.logits.float()


def table(result: dict[str, Any]) -> str:
    h, lines = result["hardware"], []
    if "speed" in result:
        found = result["speed"]
        lines += [
            f"{h['cpu']}, {h['cores']} cores, torch {h['torch']}; {result['shape']}'s shape, random weights, {CHUNKS} chunks of "
            f"{CHUNK_TOKENS} tokens and a question of {SUFFIX_TOKENS}. Seconds to the first token, medians of "
            f"{result['rounds']} rounds in turn.",
            "",
            "| | weights, MiB | " + " | ".join(BLENDS) + " | decode, tokens/s |",
            "|---" * (len(BLENDS) + 3) + "|",
        ]
        for name, row in found.items():
            seconds = " | ".join(f"{row[blend]:.2f}" for blend in BLENDS)
            lines.append(f"| {name} | {row['weights_mib']:,.0f} | {seconds} | {row['decode']:.1f} |")
        lines.append("")
    if "fidelity" in result:
        lines += [
            f"SmolLM2-135M-Instruct over {result['fidelity']['float32']['tokens']:,} tokens of the handbook, beside itself in "
            "float32.",
            "",
            "| | KL, nats a token | same first choice |",
            "|---|---|---|",
        ]
        lines += [f"| {name} | {row['kl']:.2g} | {row['top1']:.1%} |" for name, row in result["fidelity"].items()]
    return "\n".join(["# What a model computes in", "", *lines, "", "By `benchmarks/precision.py`.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/qwen2.5-0.5b.json")
    parser.add_argument("--only", default="speed,fidelity")
    arguments = parser.parse_args()
    result: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    result["hardware"] = hardware()
    if "fidelity" in arguments.only:
        result["fidelity"] = fidelity()
    if "speed" in arguments.only:
        result |= {"shape": arguments.config.stem, "rounds": arguments.rounds}
        with tempfile.TemporaryDirectory() as folder:
            result["speed"] = speed(arguments.config, arguments.rounds, Path(folder))
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    RESULTS.with_suffix(".md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
