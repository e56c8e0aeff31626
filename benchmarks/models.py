"""Compare every model family with transformers and with a reference implementation of blending; fill in
results/models.md and docs/models.md.

    python benchmarks/models.py [--speed [--rounds 5]] [--only MODEL_TYPE,MODEL_TYPE]

Runs the configurations of tests/model/test_parity.py: small checkpoints with random weights and the files of models on
the hub. --speed first measures a full prefill against transformers at a common small shape (float32, one prompt,
alternating in one process, medians after a warm-up) and writes benchmarks/results/model_speed.json. --only runs the
configurations of these model_types alone: the table keeps the other rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
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
from machine import hardware  # noqa: E402
from parity import Parity, compare, write_documents  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: E402

from cacheblend_cli.engine.config import EngineConfig  # noqa: E402
from cacheblend_cli.engine.engine import Engine  # noqa: E402
from cacheblend_cli.engine.measured_prefill import prefill  # noqa: E402
from cacheblend_cli.engine.request.resolve import resolve  # noqa: E402
from cacheblend_cli.evaluation.speed import ordinary_ids, random_ids  # noqa: E402
from cacheblend_cli.model.families import FAMILIES, WRAPPERS, spec_from_config  # noqa: E402
from cacheblend_cli.types import AskRequest, BlendParams  # noqa: E402

PARITY = ROOT / "benchmarks" / "results" / "models.md"
PAGE = ROOT / "docs" / "models.md"
SPEED = ROOT / "benchmarks" / "results" / "model_speed.json"
TOKENS = 480
SHAPE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}  # fmt: skip
WIDER = {"head_dim": 64, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
EXPLAINED = 1e-3  # difference that rounding explains, relative to the largest logit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true", help="measure speed first (needs a quiet machine)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds for --speed")
    parser.add_argument("--only", default="", help="run these model_types alone")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if arguments.speed:
        measure_speeds(arguments.rounds)
    only = set(filter(None, arguments.only.split(",")))
    table = parity_table(only, PARITY.read_text(encoding="utf-8"))
    fill(PARITY, table=table)
    fill(PAGE, families=families(table), kv=kv_table())


def fill(page: Path, **blocks: str) -> None:
    """Write the blocks between their marks in a page."""
    text = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, block=block: f"{m[1]}\n{block}\n{m[2]}", text, flags=re.DOTALL)
    page.write_text(text, encoding="utf-8")


def families(table: str) -> str:
    """Return the model_types of a parity table, those on the generic path apart."""
    names = {path: re.findall(rf"^\| (`\S+`){path} \|", table, re.MULTILINE) for path in ("", ", generic path")}
    own, generic = (", ".join(found) for found in names.values())
    return f"- own layers: {own}\n- [generic path](#other-decoders-the-generic-path): {generic}\n"


def parity_table(only: set[str], page: str) -> str:
    """Run every configuration and return a row per model_type: the largest differences over its configurations. only:
    run these, and take the other rows from the page."""
    begin = time.perf_counter()
    found: dict[str, list[Parity]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        documents = write_documents(Path(folder) / "documents")
        for number, model in enumerate([*hub_models.RUN, *hub_families.RUN, *hub_generic.RUN]):
            path = Path(folder) / str(number)
            if only:
                model.write(path / "written")
                if _family(json.loads((path / "written" / "config.json").read_text(encoding="utf-8"))) not in only:
                    continue
            parity = compare(model, path, documents)
            config = json.loads((path / "model" / "config.json").read_text(encoding="utf-8"))
            found[_family(config)].append(parity)
            print(f"{model.name}: {parity}", file=sys.stderr)
    if only:
        return _merged(page, {f"`{name}`": _row(name, found[name]) for name in only})
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


def _merged(page: str, rows: dict[str, str]) -> str:
    """The page's table with these rows in it, by name, and the row of all as they make it."""
    table = page.split("<!-- table -->")[1].split("<!-- end -->")[0].strip()
    head, body = table.splitlines()[:2], table.splitlines()[2:]
    own = {row.split("|")[1].strip(): row for row in body if row.startswith("|")}
    own.pop("all")
    own |= {name: row.rstrip() for name, row in rows.items()}
    order = sorted(own, key=lambda name: ("generic path" in name, name.split("`")[1]))
    cells = [[cell.strip() for cell in own[name].split("|")] for name in order]
    worst = [max((row[column] for row in cells), key=float) for column in (3, 4, 5)]
    count, least = sum(int(row[2]) for row in cells), min((row[6] for row in cells), key=float)
    decoded = "all" if all(row[7] == "all" for row in cells) else "see above"
    every = f"| all | {count} | {' | '.join(worst)} | {least} | {decoded} |  |"
    said = re.sub(
        r"^\d+ configurations of \d+ model_types(?: in \d+ s)?",
        f"{count} configurations of {len(cells)} model_types",
        body[-1],
    )
    return "\n".join([*head, *(own[name] for name in order), every, "", said]) + "\n"


LATENT_SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "DeepSeek-V3 (671B)": ({"model_type": "deepseek_v3"}, "Llama-3.1-405B"),
    "DeepSeek-V2-Lite (16B)": (
        {
            "model_type": "deepseek_v2",
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
        },
        "Qwen3-14B",
    ),
    "GLM-4.7-Flash (30B)": ({"model_type": "glm4_moe_lite"}, "Qwen3-30B-A3B"),
    "MiniCPM3-4B": ({"model_type": "minicpm3"}, "Qwen3-4B"),
    "Youtu-LLM-2B": ({"model_type": "youtu"}, "Qwen3-1.7B"),
}
GROUPED_SHAPES = {  # layers, KV heads, head_dim
    "Llama-3.1-405B": (126, 8, 128), "Qwen3-14B": (40, 8, 128), "Qwen3-30B-A3B": (48, 4, 128), "Qwen3-4B": (36, 8, 128),
    "Qwen3-1.7B": (28, 8, 128),
}  # fmt: skip


def kv_table() -> str:
    """Return what KV of a token takes in 16 bits, of published models with latent attention and of models of about
    their size with grouped heads; the first are computed from the classes' own shapes."""
    text = "| model | latent and position key | K and V of its heads | a model of that size | K and V there | share |\n|---|---|---|---|---|---|\n"
    for name, (config, other) in LATENT_SHAPES.items():
        spec, (layers, heads, dim) = spec_from_config(config), GROUPED_SHAPES[other]
        assert spec.latent is not None
        grouped = spec_from_config(
            {"model_type": "llama", "vocab_size": 1, "hidden_size": heads * dim, "intermediate_size": 1, "num_hidden_layers": layers,
             "num_attention_heads": heads, "head_dim": dim}
        ).kv_bytes_per_token(2)  # fmt: skip
        own = spec.kv_bytes_per_token(2)
        heads_kv = 2 * spec.num_layers * spec.num_heads * (spec.latent.nope_dim + spec.head_dim + spec.latent.value_dim)
        text += (
            f"| {name}, {spec.num_layers} x ({spec.latent.rank} + {spec.head_dim}) | {own / 1024:.1f} KiB | {heads_kv / 1024:.0f} KiB | "
            f"{other}, {layers} x 2 x {heads} x {dim} | {grouped / 1024:.0f} KiB | {own / grouped:.2f} |\n"
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
    measured = _speeds().get("models", {}).get(name)
    return f"{measured['ours_s'] / measured['theirs_s']:.2f}" if measured else ""


def _speed_setup() -> str:
    speeds = _speeds()
    if not speeds:
        return ""
    h, shape = speeds["hardware"], speeds["shape"]
    return f" Time: {speeds['tokens']} tokens, hidden size {shape['hidden_size']}, {h['cpu']}, {h['threads']} threads."


def _speeds() -> dict[str, Any]:
    return json.loads(SPEED.read_text(encoding="utf-8")) if SPEED.is_file() else {}


def _all(found: dict[str, list[Parity]], name: str) -> list[int]:
    return [getattr(parity, name) for family in found.values() for parity in family]


def measure_speeds(rounds: int) -> None:
    """Write results/model_speed.json: medians of a full prefill, ours and transformers', for each model_type."""
    found: dict[str, dict[str, Any]] = {}
    seen = set[Any]()
    with tempfile.TemporaryDirectory() as folder:
        for number, model in enumerate([*hub_models.RUN, *hub_families.RUN, *hub_generic.RUN]):
            path = Path(folder) / str(number)
            if model.config in seen:
                continue  # this class was measured with another configuration
            try:
                wide(model).write(path)
                kind = _family(json.loads((path / "config.json").read_text(encoding="utf-8")))
                if kind in found:
                    continue
                measured = measure(path, rounds)
            except Exception as error:  # this configuration does not exist in the common shape
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
    SPEED.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def wide(model: HubModel) -> HubModel:
    """Return the same configuration in the common shape."""
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
    """Return median seconds of a full prefill, ours and transformers', and the relative difference of the last
    logits."""
    engine = Engine.load(EngineConfig(model=str(path), dtype="float32", prompt="{chunks}\n\n{question}"))
    runtime, ordinary = engine.runtime, ordinary_ids(engine.model)
    ids = random_ids(ordinary, TOKENS, torch.Generator().manual_seed(1))
    request = resolve(runtime, None, AskRequest("", (), BlendParams(mode="full")), suffix_ids=ids)
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
