"""Many questions at once: requests per second, time to the first token and tokens per second of the serving engine.

    python benchmarks/serve.py [--minutes 15]
    python benchmarks/serve.py --quick      # two minutes with a tiny model, to see that every part works

Qwen2.5-0.5B's shape with random weights, fp32 on CPU; four chunks of 512 tokens per prompt, drawn by Zipf's law from
64, answers of 32 tokens. Closed loops (a number of clients, each asking again when answered) and Poisson arrivals,
blended and by full prefills, with the same prompts.

Every part runs over as many requests as its share of the minutes allows. Results are written after each part; a later
run does the parts that are not in --out yet. To repeat parts: --parts "full 8,blend 16".
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
SLOTS = 16
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
FORMS = {
    "requests": ("requests", "d"), "arrivals/s": ("rate", ".2f"), "requests/s": ("requests_per_s", ".3f"),
    "tokens/s": ("tokens_per_s", ".1f"), "TTFT s": ("ttft_s", ".2f"), "p95": ("ttft_p95_s", ".2f"),
    "scheduling": ("scheduling_share", ".2%"), "prefix cache hits": ("prefix_cache_share", ".0%"),
}  # fmt: skip

Case = dict[str, Any]


@dataclass
class Bench:
    """State shared by the parts. ttft_s: of a single question, by mode; token_s: per token of its answer; found:
    earlier parts."""

    engine: Engine
    store: ChunkStore
    questions: list[AskRequest]
    arguments: argparse.Namespace
    found: dict[str, Any]
    ttft_s: dict[str, float]
    token_s: float

    def asked(self, mode: str, count: int) -> list[AskRequest]:
        return [replace(q, blend=MODES[mode]) for q in self.questions[:count]]

    def fitting(self, seconds: float, mode: str, clients: int = 1) -> int:
        """Return the number of questions that can be answered in the seconds, at least two."""
        each = self.ttft_s[mode] + self.token_s * self.arguments.answer_tokens / min(clients, 4)
        return max(2, min(len(self.questions), int(seconds / each)))

    def limits(self, **others: Any) -> Limits:
        return Limits(max_waiting=10_000, max_sequences=SLOTS, **others)


Part = Callable[[Bench, float], list[Case]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/qwen2.5-0.5b.json")
    parser.add_argument("--minutes", type=float, default=15.0, help="of the whole")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", default="", help="only these, anew, by their names in the results")
    parser.add_argument("--requests", type=int, default=32, help="of each part at most")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--per-prompt", type=int, default=4)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.minutes, arguments.chunks, arguments.chunk_tokens, arguments.requests = 2.0, 8, 64, 16
    until, out = time.monotonic() + 60 * arguments.minutes, arguments.out / f"serve{'-quick' * arguments.quick}.json"
    result = begun(arguments, out)
    wanted = [name.strip() for name in arguments.parts.split(",") if name.strip()]
    left = [name for name in PARTS if (name in wanted if wanted else name not in result["parts"])]
    with tempfile.TemporaryDirectory() as folder:
        bench = prepared(Path(folder), arguments, result["parts"])
        with bench.store:
            for number, name in enumerate(left):
                part, share = PARTS[name]
                seconds = (until - time.monotonic()) * share / sum(PARTS[n][1] for n in left[number:])
                started = time.monotonic()
                cases = part(bench, max(0.0, seconds))
                took = time.monotonic() - started
                result["parts"][name] = {"given_s": seconds, "took_s": took, "cases": cases}
                print(f"{name}: {took:.0f} s of {seconds:.0f}", *map(json.dumps, cases), sep="\n  ", flush=True)
                save(result, out, page(result))
    print(page(result))


def begun(arguments: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Return the existing results if they have these settings, else an empty result."""
    own = ("quick", "config", "chunks", "chunk_tokens", "per_prompt", "answer_tokens")
    settings = {k: v.name if isinstance(v, Path) else v for k, v in vars(arguments).items() if k in own}
    new: dict[str, Any] = {"hardware": hardware(), "settings": settings}
    old = read_result(out)
    return old if {k: old.get(k) for k in new} == new else new | {"parts": {}}


def prepared(folder: Path, arguments: argparse.Namespace, found: dict[str, Any]) -> Bench:
    """Return a checkpoint, a store of its documents, and the cost of a single question, from which parts are sized."""
    checkpoint = write_checkpoint(folder / "model", arguments.config, **(TINY if arguments.quick else {}))
    engine = Engine.load(EngineConfig(model=str(checkpoint), dtype="float32", speculate="off"))
    store = ChunkStore.open(folder / "store", mode="write")
    asked = questions(collect(engine, store, folder / "docs", arguments), arguments)
    bench = Bench(engine, store, asked, arguments, found, {}, 0.0)
    for mode, blend in MODES.items():
        few = replace(asked[-1], blend=blend, sampling=replace(asked[-1].sampling, max_tokens=4))
        answers = [engine.run_alone(store, few, AskOptions(save=False)) for _ in range(2)]  # warm-up
        bench.ttft_s[mode], bench.token_s = answers[1].timing.ttft_s, 1 / answers[1].timing.decode_tokens_per_s
    return bench


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


def questions(keys: list[bytes], arguments: argparse.Namespace) -> list[AskRequest]:
    """Draw chunks by Zipf's law, without repeats in a prompt."""
    rng = random.Random(2)
    weights = [1 / (rank + 1) for rank in range(len(keys))]
    sampling = SamplingParams(max_tokens=arguments.answer_tokens, ignore_eos=True)
    found = []
    for number in range(arguments.requests):
        chosen: list[bytes] = []
        while len(chosen) < min(arguments.per_prompt, len(keys)):
            key = rng.choices(keys, weights)[0]
            if key not in chosen:
                chosen.append(key)
        found.append(AskRequest(f"what does {rng.choice(WORDS)} say of {number}?", chosen, BlendParams(), sampling))
    return found


def closed(mode: str, clients: int, caching: bool, bench: Bench, seconds: float) -> list[Case]:
    """Run a number of clients, each asking again when answered."""
    asked = iter(bench.asked(mode, bench.fitting(seconds, mode, clients)))

    def clients_ask(ask: Ask) -> None:
        for _, question in list(zip(range(clients), asked, strict=False)):
            ask(question, lambda: next(asked, None))

    return [served(bench, bench.limits(enable_prefix_caching=caching), clients_ask) | {"clients": clients}]


def poisson(load: float, bench: Bench, seconds: float) -> list[Case]:
    """Send Poisson arrivals at a share of the request rate that a closed loop of 16 reached."""
    closed_loop = bench.found.get("blend 16")
    alone = 1 / (bench.ttft_s["blend"] + bench.token_s * bench.arguments.answer_tokens)
    rate = load * (closed_loop["cases"][0]["requests_per_s"] if closed_loop else alone)
    asked, rng = bench.asked("blend", max(2, min(len(bench.questions), int(seconds * rate)))), random.Random(3)

    def arrivals(ask: Ask) -> None:
        for question in asked:
            ask(question, lambda: None)
            time.sleep(rng.expovariate(rate))

    return [served(bench, bench.limits(), arrivals) | {"rate": rate}]


Ask = Callable[[AskRequest, Callable[[], AskRequest | None]], None]


def served(bench: Bench, limits: Limits, load: Callable[[Ask], None]) -> Case:
    """Measure a load. load: submits questions, and says what to ask after each answer."""
    service = AsyncEngine(bench.engine.runtime, limits, features=FEATURES)
    ended: queue.SimpleQueue[tuple[Event, float]] = queue.SimpleQueue()
    begun = []

    def ask(question: AskRequest, then: Callable[[], AskRequest | None]) -> None:
        submitted = time.perf_counter()

        def heard(event: Event) -> None:
            if isinstance(event, Done | Failed):
                if (following := then()) is not None:
                    ask(following, then)
                ended.put((event, time.perf_counter() - submitted))

        begun.append(question)
        service.submit(bench.engine.resolve(bench.store, replace(question, options=AskOptions(save=False))), heard)

    started = time.perf_counter()
    load(ask)
    answers, waited = [], []
    while len(answers) < len(begun):
        event, latency = ended.get()
        if isinstance(event, Failed):
            raise event.error
        assert isinstance(event, Done)
        answers.append(event.answers[0])
        waited.append(latency)
    seconds = time.perf_counter() - started
    stats = service.stats()
    service.close()
    return figures(answers, seconds) | {
        "latency_s": statistics.median(waited),
        "scheduling_share": stats.scheduling_s / stats.step_s,
        "prefix_cache_share": stats.prefix_cached / sum(a.prompt_tokens for a in answers),
    }


PARTS: dict[str, tuple[Part, float]] = {
    **{f"blend {n}": (partial(closed, "blend", n, True), s) for n, s in ((1, 15), (4, 20), (8, 25), (16, 50))},
    **{f"full {n}": (partial(closed, "full", n, True), s) for n, s in ((1, 20), (4, 30), (8, 50), (16, 110))},
    "blend 16, no prefix cache": (partial(closed, "blend", 16, False), 35),
    "full 8, no prefix cache": (partial(closed, "full", 8, False), 40),
    **{f"Poisson {load:g}": (partial(poisson, load), 25) for load in (0.5, 0.8, 1.0)},
}
"""Each part, and its share of the time."""


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
    ratios = [
        ("our own full prefill", 3, ours / full if full else None),
        ("the best baseline", 2, ours / best if best else None),
    ]
    lines += [*table(("case", *FORMS), rows), "", *others, *[""] * bool(others)]
    if earlier := result.get("earlier"):
        lines += [earlier, ""]
    lines += [
        f"- requests per second at saturation: {ratio:.2f} x those of {of} (target: {target})"
        for of, target, ratio in ratios
        if ratio is not None
    ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
