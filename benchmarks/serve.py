"""Many questions at once: requests per second, time to the first token and tokens per second of the serving engine.

    python benchmarks/serve.py [--clients 1,4,8,16]
    python benchmarks/serve.py --quick --out /tmp      # a tiny model, to see that it works

Qwen2.5-0.5B's shape with random weights, fp32 on CPU; four chunks of 512 tokens per prompt, drawn by Zipf's law from
64, answers of 32 tokens. Closed loops: a number of clients, each asking again when answered, two questions each and
four at least, blended and by full prefills, with the same prompts.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from cacheblend_store import ChunkStore
from machine import RESULTS, ROOT, hardware, read_result, save, table, write_checkpoint

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.async_engine import AsyncEngine
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.events import Done, Event, Failed, Limits
from cacheblend_cli.engine.features import FEATURES
from cacheblend_cli.types import Answer, AskOptions, AskRequest, BlendParams, SamplingParams

WORDS = (
    "harbor parrot ledger Bergen Mara billing keeps lead river stone winter letter engine garden copper signal".split()
)
MODES = {"blend": BlendParams(), "full": BlendParams(mode="full")}
SLOTS, REQUESTS, PER_PROMPT, ANSWER_TOKENS = 16, 32, 4, 32
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
FORMS = {
    "requests": ("requests", "d"), "arrivals/s": ("rate", ".2f"), "requests/s": ("requests_per_s", ".3f"),
    "tokens/s": ("tokens_per_s", ".1f"), "TTFT s": ("ttft_s", ".2f"), "p95": ("ttft_p95_s", ".2f"),
    "scheduling": ("scheduling_share", ".2%"), "prefix cache hits": ("prefix_cache_share", ".0%"),
}  # fmt: skip

Case = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/qwen2.5-0.5b.json")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clients", default="1,4,8,16")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.chunks, arguments.chunk_tokens = 8, 64
    settings = {"config": arguments.config.name, "chunks": arguments.chunks, "chunk_tokens": arguments.chunk_tokens}
    result, out = {"hardware": hardware(), "settings": settings, "parts": {}}, arguments.out / "serve.json"
    if (old := read_result(out)).get("hardware") == result["hardware"]:
        result["parts"] = old["parts"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = write_checkpoint(folder / "model", arguments.config, **(TINY if arguments.quick else {}))
        engine = Engine.load(EngineConfig(model=str(checkpoint), dtype="float32", speculate="off"))
        with ChunkStore.open(folder / "store", mode="write") as store:
            asked = questions(collect(engine, store, folder / "docs", arguments))
            for mode, blend in MODES.items():
                own = [replace(question, blend=blend) for question in asked]
                engine.run_alone(store, own[-1])  # warm-up
                for clients in map(int, arguments.clients.split(",")):
                    case = closed_loop(engine, store, own[: max(4, 2 * clients)], clients)
                    result["parts"][f"{mode} {clients}"] = {"cases": [case]}
                    print(mode, json.dumps(case), flush=True)
    save(result, out, page(result))
    print(page(result))


def collect(engine: Engine, store: ChunkStore, folder: Path, arguments: argparse.Namespace) -> list[bytes]:
    """Store documents of one chunk each, of about the requested number of tokens."""
    rng = random.Random(1)
    folder.mkdir()
    for number in range(arguments.chunks):
        text = ""
        while len(engine.model.tokenizer.encode_text(text)) < arguments.chunk_tokens - 4:
            text += " " + " ".join(rng.choices(WORDS, k=4))
        (folder / f"{number}.md").write_text(text + "\n")
    options = PrecomputeOptions(chunk_tokens=arguments.chunk_tokens, context="sink")
    engine.precompute(store, [str(folder)], options, lambda event: None)
    return [m.key for m in store.chunks()]


def questions(keys: list[bytes]) -> list[AskRequest]:
    """Draw chunks by Zipf's law, without repeats in a prompt."""
    rng = random.Random(2)
    weights = [1 / (rank + 1) for rank in range(len(keys))]
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    found = []
    for number in range(REQUESTS):
        chosen: list[bytes] = []
        while len(chosen) < min(PER_PROMPT, len(keys)):
            key = rng.choices(keys, weights)[0]
            if key not in chosen:
                chosen.append(key)
        found.append(AskRequest(f"what does {rng.choice(WORDS)} say of {number}?", chosen, BlendParams(), sampling))
    return found


def closed_loop(engine: Engine, store: ChunkStore, asked: list[AskRequest], clients: int) -> Case:
    """Measure a number of clients, each asking again when answered."""
    service = AsyncEngine(engine.runtime, Limits(max_waiting=10_000, max_sequences=SLOTS), features=FEATURES)
    ended, left = queue.SimpleQueue[Event](), iter(asked)

    def ask() -> None:
        if (question := next(left, None)) is not None:
            service.submit(engine.resolve(store, replace(question, options=AskOptions(save=False))), on_event)

    def on_event(event: Event) -> None:
        if isinstance(event, Done | Failed):
            ask()
            ended.put(event)

    started, answers = time.perf_counter(), list[Answer]()
    for _ in range(clients):
        ask()
    for _ in asked:
        event = ended.get()
        if isinstance(event, Failed):
            raise event.error
        assert isinstance(event, Done)
        answers.append(event.answers[0])
    seconds, stats = time.perf_counter() - started, service.stats()
    service.close()
    return figures(answers, seconds) | {
        "scheduling_share": stats.scheduling_s / stats.step_s,
        "prefix_cache_share": stats.prefix_cached / sum(a.prompt_tokens for a in answers),
        "clients": clients,
    }


def figures(answers: list[Answer], seconds: float) -> Case:
    ttft = sorted(a.timing.ttft_s for a in answers)
    return {
        "requests": len(answers),
        "requests_per_s": len(answers) / seconds,
        "tokens_per_s": sum(len(a.generated_ids) for a in answers) / seconds,
        "ttft_s": statistics.median(ttft),
        "ttft_p95_s": ttft[min(len(ttft) - 1, int(0.95 * len(ttft)))],
    }


def page(result: dict[str, Any]) -> str:
    """Return a table of the cases with a request rate, the other figures as a list, and ratios."""
    lines = ["# Many questions at once", "", json.dumps(result["hardware"]), "", json.dumps(result["settings"]), ""]
    rows, others, parts = list[tuple[str, ...]](), list[str](), result["parts"]
    for name, case in ((name, case) for name, part in parts.items() for case in part["cases"]):
        title = ", ".join(filter(None, (name, case.get("case"))))
        if "requests_per_s" in case:
            rows.append((title, *(format(case[key], form) if key in case else "" for key, form in FORMS.values())))
        else:
            values = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in case.items() if k != "case")
            others.append(f"- {title}: " + ", ".join(values))

    def highest(*names: str) -> float:
        cases = (c for name, p in parts.items() if name.startswith(names) for c in p["cases"])
        return max((c["requests_per_s"] for c in cases if "requests_per_s" in c), default=0.0)

    ours, full, best = highest("blend "), highest("full "), highest("transformers", "llama.cpp")
    ratios = {"our own full prefill (target: 3)": full, "the best baseline (target: 2)": best}
    lines += [*table(("case", *FORMS), rows), "", *others, *[""] * bool(others)]
    lines += [result["earlier"], ""] if "earlier" in result else []
    lines += [
        f"- requests per second at saturation: {ours / rate:.2f} x those of {of}" for of, rate in ratios.items() if rate
    ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
