"""Many questions at once: requests per second, time to the first token and tokens per second of the serving engine.

    python benchmarks/serve.py [--minutes 15] [--llama-python PYTHON]
    python benchmarks/serve.py --quick      # two minutes with a tiny model, to see that every part works

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from baselines import CONTINUOUS, complete, llama_server, write_gguf
from cacheblend_store import ChunkStore
from machine import RESULTS, ROOT, hardware, read_result, save, table, timed, write_checkpoint
from transformers import AutoModelForCausalLM, GenerationConfig

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.async_engine import AsyncEngine
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.events import Done, Event, Failed, Limits
from cacheblend_cli.engine.features import FEATURES
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.types import Answer, AskOptions, AskRequest, BlendParams, SamplingParams

WORDS = (
    "harbor parrot ledger Bergen Mara billing keeps lead river stone winter letter engine garden copper signal".split()
)
MODES = {"blend": BlendParams(), "full": BlendParams(mode="full"), "reuse": BlendParams(mode="reuse")}
SLOTS = 16
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
LLAMA_SLOTS = 4
FORMS = {
    "requests": ("requests", "d"), "arrivals/s": ("rate", ".2f"), "requests/s": ("requests_per_s", ".3f"),
    "tokens/s": ("tokens_per_s", ".1f"), "TTFT s": ("ttft_s", ".2f"), "p95": ("ttft_p95_s", ".2f"),
    "scheduling": ("scheduling_share", ".2%"), "prefix cache hits": ("prefix_cache_share", ".0%"),
}  # fmt: skip
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
    own = ("quick", "config", "chunks", "chunk_tokens", "per_prompt", "answer_tokens", "pool_tokens")
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
    """Run generate, one prompt after another for a quarter of the seconds; then its continuous batching, in a process
    of its own, since a caller waits forever if its thread fails."""
    tokens, started, count = bench.arguments.answer_tokens, time.perf_counter(), 0
    config = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=-1)
    model = AutoModelForCausalLM.from_pretrained(bench.checkpoint, dtype=torch.float32).eval()
    while count < len(bench.prompts) and (not count or time.perf_counter() - started < seconds / 4):
        ids = torch.tensor([bench.prompts[count]])
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        count += 1
    rate = count / (time.perf_counter() - started)
    found: list[Case] = [{"case": "one by one", "requests": count, "requests_per_s": rate}]
    del model
    prompts = bench.prompts[: max(2, min(len(bench.prompts), int(seconds / 2 * rate)))]
    pages = 1 + sum(-(-(len(p) + tokens) // 256) for p in prompts)
    given = json.dumps([str(bench.checkpoint), prompts, tokens, pages, torch.get_num_threads()])
    command, batching = [sys.executable, "-c", CONTINUOUS], {"case": "continuous batching"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": max(60.0, seconds)}
    try:
        took = json.loads(subprocess.run(command, input=given, **options).stdout.splitlines()[-1])
    except subprocess.SubprocessError as error:
        return [*found, batching | {"error": str(error)[-200:]}]
    return [*found, batching | {"requests": len(prompts), "requests_per_s": len(prompts) / took}]


def llama_cpp(bench: Bench, seconds: float) -> list[Case]:
    """Run llama.cpp's server with four slots, each with room for a prompt; weights in float32 as ours, KV in
    float16."""
    if not (python := bench.arguments.llama_python):
        return [{"error": "not measured: --llama-python names an interpreter with xllamacpp"}]
    file, prompts, tokens = bench.checkpoint.parent / "model.gguf", bench.prompts, bench.arguments.answer_tokens
    write_gguf(bench.checkpoint, file, "F32")
    context = LLAMA_SLOTS * (-(-(max(map(len, prompts)) + tokens + 1) // 256) * 256)

    def completed(prompts: list[tuple[int, ...]], clients: int) -> float:
        with ThreadPoolExecutor(clients) as pool:
            return timed(lambda: list(pool.map(lambda prompt: complete(address, prompt, tokens), prompts)))

    with llama_server(python, file, context, LLAMA_SLOTS, torch.get_num_threads()) as address:
        alone = completed(prompts[:1], 1)
        count = max(LLAMA_SLOTS, min(len(prompts) - 1, int((seconds - alone) / alone)))
        took = completed(prompts[1 : count + 1], LLAMA_SLOTS)
    return [{"case": f"{LLAMA_SLOTS} slots", "requests": count, "requests_per_s": count / took}]


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
    lines += [*table(("case", *FORMS), rows), "", *others, ""]
    lines += [
        f"- requests per second at saturation: {ratio:.2f} x those of {of} (target: {target})"
        for of, target, ratio in ratios
        if ratio is not None
    ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
