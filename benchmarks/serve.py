"""Many questions at once: requests per second, time to the first token and tokens per second of the serving engine.

    python benchmarks/serve.py [--minutes 15] [--llama-python PYTHON] [--out benchmarks/results/serve.json]
    python benchmarks/serve.py --quick      # two minutes with a tiny model, to see that every part works
    python benchmarks/serve.py --novel 500  # only this: ever new sets of documents, and the server's memory

Qwen2.5-0.5B's shape with random weights, fp32 on CPU; four chunks of 512 tokens per prompt, drawn by Zipf's law from
64, answers of 32 tokens. One question after another; closed loop (a number of clients, each asking again when answered)
and Poisson arrivals, blended and by full prefills; transformers' generate and its continuous batching; llama.cpp's
server with parallel slots, if PYTHON has xllamacpp. All get the same prompts.

Every part runs over as many requests as its share of the minutes allows. Results are written after each part; a later
run does the parts that are not in --out yet. To repeat parts: --parts "decode,blend 16".
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import serve_others
from cacheblend_store import ChunkStore
from machine import hardware, write_checkpoint
from serve_novel import measure_novel, write_novel
from serve_report import table

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.async_engine import AsyncEngine
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.events import Done, Event, Failed, Limits
from cacheblend_cli.engine.features import FEATURES
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.types import Answer, AskOptions, AskRequest, BlendParams, SamplingParams

ROOT = Path(__file__).parent.parent
WORDS = (
    "harbor parrot ledger Bergen Mara billing keeps lead river stone winter letter engine garden copper signal".split()
)
MODES = {"blend": BlendParams(), "full": BlendParams(mode="full"), "reuse": BlendParams(mode="reuse")}
SLOTS = 16
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
DECODED = (16, 64)  # answer lengths: the difference of their times is decoding alone

Case = dict[str, Any]


@dataclass
class Bench:
    """State shared by the parts. ttft_s: of a single question, by mode; token_s: per token of its answer; found:
    earlier parts."""

    engine: Engine
    store: ChunkStore
    checkpoint: Path
    questions: list[AskRequest]
    prompts: list[tuple[int, ...]]
    arguments: argparse.Namespace
    found: dict[str, Any]
    ttft_s: dict[str, float]
    token_s: float

    def request(self, ask: AskRequest) -> Request:
        return self.engine.resolve(self.store, replace(ask, options=AskOptions(save=False)))

    def asked(self, mode: str, count: int) -> list[AskRequest]:
        return [replace(q, blend=MODES[mode]) for q in self.questions[:count]]

    def fitting(self, seconds: float, mode: str, clients: int = 1) -> int:
        """Return the number of questions that can be answered in the seconds, at least two."""
        each = self.ttft_s[mode] + self.token_s * self.arguments.answer_tokens / min(clients, 4)
        return max(2, min(len(self.questions), int(seconds / each)))

    def limits(self, **others: Any) -> Limits:
        return Limits(max_waiting=10_000, max_sequences=SLOTS, pool_tokens=self.arguments.pool_tokens, **others)


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
    parser.add_argument("--pool-tokens", type=int, default=None)
    parser.add_argument("--llama-python", default="", help="an interpreter with xllamacpp")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/serve.json")
    parser.add_argument("--novel", type=int, metavar="QUESTIONS", help="only these, each over a new set of documents")
    arguments = parser.parse_args()
    if arguments.novel:
        with tempfile.TemporaryDirectory() as folder:
            print(write_novel(measure_novel(Path(folder), arguments.config, arguments.novel, 60 * arguments.minutes)))
        return
    if arguments.quick:
        arguments.minutes, arguments.chunks, arguments.chunk_tokens, arguments.requests = 2.0, 8, 64, 16
    until = time.monotonic() + 60 * arguments.minutes
    result = begun(arguments)
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
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(result, indent=2) + "\n")
                arguments.out.with_suffix(".md").write_text(table(result))
    print(table(result))


def begun(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the existing results if they have these settings, else an empty result."""
    own = ("quick", "config", "chunks", "chunk_tokens", "per_prompt", "answer_tokens", "pool_tokens")
    settings = {k: v.name if isinstance(v, Path) else v for k, v in vars(arguments).items() if k in own}
    new = {"hardware": hardware(), "settings": settings, "parts": {}}
    if not arguments.out.is_file():
        return new
    old = json.loads(arguments.out.read_text())
    return (
        old
        if {k: old.get(k) for k in ("hardware", "settings")} == {k: new[k] for k in ("hardware", "settings")}
        else new
    )


def prepared(folder: Path, arguments: argparse.Namespace, found: dict[str, Any]) -> Bench:
    """Return a checkpoint, a store of its documents, and the cost of a single question, from which parts are sized."""
    config = json.loads(arguments.config.read_text()) | (TINY if arguments.quick else {})
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = write_checkpoint(folder / "model", folder / "config.json")
    engine = Engine.load(EngineConfig(model=str(checkpoint), dtype="float32", speculate="off"))
    store = ChunkStore.open(folder / "store", mode="write")
    asked = questions(collect(engine, store, folder / "docs", arguments), arguments)
    prompts = [tuple(resolve(engine.runtime, store, q).plan.token_ids) for q in asked]
    bench = Bench(engine, store, checkpoint, asked, prompts, arguments, found, {}, 0.0)
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


def one_by_one(mode: str, bench: Bench, seconds: float) -> list[Case]:
    """Answer one question after another."""
    started = time.perf_counter()
    asked = bench.asked(mode, bench.fitting(seconds, mode))
    answers = [bench.engine.run_alone(bench.store, question, AskOptions(save=False)) for question in asked]
    return [figures(answers, time.perf_counter() - started) | {"clients": 1}]


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
        service.submit(bench.request(question), heard)

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
        "stats": asdict(stats),
    }


def all_of(bench: Bench, service: AsyncEngine, asked: list[AskRequest]) -> list[Answer]:
    """Return the answers of questions that are submitted at once."""
    over: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in asked]

    def listener(told: queue.SimpleQueue[Event]) -> Callable[[Event], None]:
        return lambda event: told.put(event) if isinstance(event, Done | Failed) else None

    for question, told in zip(asked, over, strict=True):
        service.submit(bench.request(question), listener(told))
    events = [told.get() for told in over]
    return [e.answers[0] for e in events if isinstance(e, Done)]


def repeated(bench: Bench, seconds: float) -> list[Case]:
    """Measure the time to the first token of another question over the same chunks, and of --mode reuse."""
    service = AsyncEngine(bench.engine.runtime, bench.limits(), features=FEATURES)
    each = bench.ttft_s["blend"] + 2 * bench.ttft_s["reuse"] + bench.token_s * bench.arguments.answer_tokens
    count = max(2, min(8, int(seconds / each)))
    reuse, again = [], []
    for number, question in enumerate(bench.questions[:count]):
        short = replace(question, sampling=replace(question.sampling, max_tokens=1))
        all_of(bench, service, [question])
        again += all_of(bench, service, [replace(short, question=f"and what of {number}?")])
        reuse.append(bench.engine.run_alone(bench.store, replace(short, blend=MODES["reuse"]), AskOptions(save=False)))
    service.close()
    ttft = [statistics.median(a.timing.ttft_s for a in answers) for answers in (again, reuse)]
    cached = statistics.median(a.prefix_cache_tokens / a.prompt_tokens for a in again)
    return [
        {
            "requests": count,
            "ttft_s": ttft[0],
            "reuse_ttft_s": ttft[1],
            "ratio": ttft[0] / ttft[1],
            "prefix_cache_share": cached,
        }
    ]


def decode(bench: Bench, seconds: float) -> list[Case]:
    """Measure tokens per second of one answer and of eight. Their prompts are in the prefix cache, and short answers
    are subtracted from longer ones."""
    service = AsyncEngine(bench.engine.runtime, bench.limits(), features=FEATURES)
    speeds = []
    for count in (1, 8):
        took = []
        for tokens in (DECODED[0], *DECODED):  # the first ones fill the prefix cache
            sampling = replace(bench.questions[0].sampling, max_tokens=tokens)
            asked = [replace(bench.questions[0], question=f"{i}?", sampling=sampling) for i in range(count)]
            started = time.perf_counter()
            all_of(bench, service, asked)
            took.append(time.perf_counter() - started)
        speeds.append(count * (DECODED[1] - DECODED[0]) / (took[2] - took[1]))
    service.close()
    return [{"tokens_per_s_1": speeds[0], "tokens_per_s_8": speeds[1], "ratio": speeds[1] / speeds[0]}]


def transformers(bench: Bench, seconds: float) -> list[Case]:
    return serve_others.transformers(bench.checkpoint, bench.prompts, bench.arguments.answer_tokens, seconds)


def llama_cpp(bench: Bench, seconds: float) -> list[Case]:
    if not bench.arguments.llama_python:
        return [{"error": "not measured: --llama-python names an interpreter with xllamacpp"}]
    return serve_others.llama_cpp(
        bench.arguments.llama_python, bench.checkpoint, bench.prompts, bench.arguments.answer_tokens, seconds
    )


PARTS: dict[str, tuple[Part, float]] = {
    "blend, one by one": (partial(one_by_one, "blend"), 20),
    "full, one by one": (partial(one_by_one, "full"), 25),
    **{f"blend {n}": (partial(closed, "blend", n, True), s) for n, s in ((1, 15), (4, 20), (8, 25), (16, 50))},
    **{f"full {n}": (partial(closed, "full", n, True), s) for n, s in ((1, 20), (4, 30), (8, 50), (16, 110))},
    "blend 16, no prefix cache": (partial(closed, "blend", 16, False), 35),
    "full 8, no prefix cache": (partial(closed, "full", 8, False), 40),
    **{f"Poisson {load:g}": (partial(poisson, load), 25) for load in (0.5, 0.8, 1.0)},
    "repeated composition": (repeated, 15),
    "decode": (decode, 40),
    "transformers": (transformers, 120),
    "llama.cpp": (llama_cpp, 150),
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


if __name__ == "__main__":
    main()
