"""Many questions at once: requests a second, time to the first token and tokens a second of the engine that serves.

    python benchmarks/serve.py [--requests 32] [--rates 0.2,0.4] [--out benchmarks/results/serve.json]

Shape of Qwen2.5-0.5B with random weights, fp32 on CPU; four chunks of 512 tokens a prompt, drawn by Zipf's law from 64, answers of 32
tokens. Closed loop (so many clients, each asking again when it is answered) and Poisson arrivals; ours blended, blended without hot
blocks, and by full prefills; beside them one question after another as `ask` does it, and transformers' generate, alone and by its
continuous batching where that runs here. The quick look: --chunks 8 --chunk-tokens 64 --config configs/... --requests 8.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cacheblend_store import ChunkStore
from prefill import hardware, write_checkpoint

from cacheblend_cli.api import Answer, BlendConfig, Engine, EngineConfig, PrecomputeOptions, Question, SamplingParams
from cacheblend_cli.runtime.service import Done, Event, Failed, Job, Limits, Service

ROOT = Path(__file__).parent.parent
WORDS = (
    "harbor parrot ledger Bergen Mara billing keeps lead river stone winter letter engine garden copper signal".split()
)
MODES = {
    "blend": (BlendConfig(), Limits(max_waiting=10_000)),
    "blend, nothing hot": (BlendConfig(), Limits(max_waiting=10_000, hot=False)),
    "full": (BlendConfig(mode="full"), Limits(max_waiting=10_000)),
    "full, nothing hot": (BlendConfig(mode="full"), Limits(max_waiting=10_000, hot=False)),
}


@dataclass(frozen=True)
class Load:
    """What is asked: questions in order, so that every way of answering gets the same."""

    questions: list[Question]

    def blended(self, blend: BlendConfig) -> list[Question]:
        return [replace(q, blend=blend) for q in self.questions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/qwen2.5-0.5b.json")
    parser.add_argument("--requests", type=int, default=32, help="of each case")
    parser.add_argument("--clients", default="1,4,8,16")
    parser.add_argument("--rates", default="", help="Poisson arrivals, requests a second: 0.2,0.4")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--per-prompt", type=int, default=4)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--pool-tokens", type=int, default=None)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/serve.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "model", arguments.config)
        result = {"hardware": hardware(), "settings": {k: str(v) for k, v in vars(arguments).items()}}
        result["cases"] = measure(checkpoint, Path(folder), arguments)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    arguments.out.with_suffix(".md").write_text(table(result))
    print(table(result))


def measure(checkpoint: Path, folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    engine = Engine.load(EngineConfig(model=str(checkpoint), dtype="float32"))
    cases: list[dict[str, Any]] = []
    with ChunkStore.open(folder / "store", mode="write") as store:
        keys = collect(engine, store, folder / "docs", arguments)
        load = questions(keys, arguments)
        for name, (blend, limits) in MODES.items():
            limits = replace(limits, pool_tokens=arguments.pool_tokens, max_sequences=16)
            for clients in map(int, arguments.clients.split(",")):
                cases.append(served(engine, store, load.blended(blend), limits, clients=clients) | {"case": name})
                print(json.dumps(cases[-1]), flush=True)
            for rate in map(float, filter(None, arguments.rates.split(","))):
                cases.append(served(engine, store, load.blended(blend), limits, rate=rate) | {"case": name})
                print(json.dumps(cases[-1]), flush=True)
        for name, blend in (("ask, blend", BlendConfig()), ("ask, full", BlendConfig(mode="full"))):
            cases.append(one_by_one(engine, store, load.blended(blend)) | {"case": name})
            print(json.dumps(cases[-1]), flush=True)
        cases += repeated(engine, store, load, arguments)
        prompts = [engine.plan(store, q).prompt_tokens for q in load.questions]
    if not arguments.no_transformers:
        cases += theirs(checkpoint, prompts, arguments)
    return cases


def collect(engine: Engine, store: ChunkStore, folder: Path, arguments: argparse.Namespace) -> list[bytes]:
    """Documents of one chunk each, of about the tokens that are wanted."""
    rng = random.Random(1)
    folder.mkdir()
    for number in range(arguments.chunks):
        text = ""
        while len(engine.model.tokenizer.encode_text(text)) < arguments.chunk_tokens - 4:
            text += " " + rng.choice(WORDS)
        (folder / f"{number}.md").write_text(text + "\n")
    options = PrecomputeOptions(chunk_tokens=arguments.chunk_tokens, context="sink")
    engine.precompute(store, [str(folder)], options, lambda event: None)
    return [m.key for m in store.chunks()]


def questions(keys: list[bytes], arguments: argparse.Namespace) -> Load:
    """Chunks by Zipf's law, no chunk twice in a prompt."""
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
        found.append(Question(f"what does {rng.choice(WORDS)} say of {number}?", chosen, BlendConfig(), sampling))
    return Load(found)


def served(
    engine: Engine, store: ChunkStore, asked: list[Question], limits: Limits, *, clients: int = 0, rate: float = 0.0
) -> dict[str, Any]:
    """Closed loop of so many clients, or Poisson arrivals at a rate."""
    service = Service(engine.runtime, store, limits)
    left: queue.SimpleQueue[Question] = queue.SimpleQueue()
    for question in asked:
        left.put(question)
    answers: list[tuple[Answer, float]] = []
    failed: list[Exception] = []

    def ask(question: Question, then: Callable[[], None]) -> None:
        submitted = time.perf_counter()

        def heard(event: Event) -> None:
            if isinstance(event, Done):
                answers.append((event.answers[0], time.perf_counter() - submitted))
                then()
            elif isinstance(event, Failed):
                failed.append(event.error)
                then()

        service.submit(Job(question, save_holes=False), heard)

    started = time.perf_counter()
    if clients:
        over = threading.Semaphore(0)

        def again() -> None:
            try:
                question = left.get_nowait()
            except queue.Empty:
                over.release()
                return
            ask(question, again)

        for _ in range(clients):
            again()
        for _ in range(clients):
            over.acquire()
    else:
        rng, over = random.Random(3), threading.Semaphore(0)
        for question in asked:
            ask(question, over.release)
            time.sleep(rng.expovariate(rate))
        for _ in asked:
            over.acquire()
    seconds = time.perf_counter() - started
    stats = service.stats()
    service.close()
    if failed:
        raise failed[0]
    return {
        "clients": clients,
        "rate": rate,
        **figures([a for a, _ in answers], seconds),
        "latency_s": statistics.median(s for _, s in answers),
        "scheduling_share": stats.scheduling_s / stats.step_s,
        "hot_share": stats.hot / max(1, sum(a.prompt_tokens for a, _ in answers)),
        "stats": asdict(stats),
    }


def one_by_one(engine: Engine, store: ChunkStore, asked: list[Question]) -> dict[str, Any]:
    """As `ask --batch` was before: one after another."""
    started = time.perf_counter()
    answers = [engine.ask(store, question, save_holes=False) for question in asked]
    return {"clients": 1, "rate": 0.0, **figures(answers, time.perf_counter() - started)}


def repeated(engine: Engine, store: ChunkStore, load: Load, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The time to the first token of another question over the same chunks, beside --mode reuse; decode of one and of eight."""
    service = Service(engine.runtime, store, Limits(max_sequences=16, pool_tokens=arguments.pool_tokens))

    def all_of(asked: list[Question]) -> list[Answer]:
        over: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in asked]

        def listener(told: queue.SimpleQueue[Event]) -> Callable[[Event], None]:
            return lambda event: told.put(event) if isinstance(event, Done | Failed) else None

        for question, told in zip(asked, over, strict=True):
            service.submit(Job(question, save_holes=False), listener(told))
        events = [told.get() for told in over]
        return [e.answers[0] for e in events if isinstance(e, Done)]

    reuse, again = [], []
    for number, question in enumerate(load.questions[:8]):
        all_of([question])
        again += all_of([replace(question, text=f"and what of {number}?")])
        reuse.append(engine.ask(store, replace(question, blend=BlendConfig(mode="reuse")), save_holes=False))
    ttft = [statistics.median(a.timing.ttft_s for a in answers) for answers in (again, reuse)]
    long = replace(load.questions[0], sampling=replace(load.questions[0].sampling, max_tokens=128))
    speeds = []
    for count in (1, 8):
        all_of([long])  # hot from here on: what is timed is decoding
        started = time.perf_counter()
        answers = all_of([replace(long, text=f"{i}?") for i in range(count)])
        speeds.append(sum(len(a.generated_ids) for a in answers) / (time.perf_counter() - started))
    service.close()
    return [
        {"case": "repeated composition", "ttft_s": ttft[0], "reuse_ttft_s": ttft[1], "ratio": ttft[0] / ttft[1]},
        {"case": "decode", "tokens_per_s_1": speeds[0], "tokens_per_s_8": speeds[1], "ratio": speeds[1] / speeds[0]},
    ]


def figures(answers: list[Answer], seconds: float) -> dict[str, Any]:
    ttft = sorted(a.timing.ttft_s for a in answers)
    return {
        "requests_per_s": len(answers) / seconds,
        "tokens_per_s": sum(len(a.generated_ids) for a in answers) / seconds,
        "ttft_s": statistics.median(ttft),
        "ttft_p95_s": ttft[min(len(ttft) - 1, int(0.95 * len(ttft)))],
    }


def theirs(checkpoint: Path, lengths: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """transformers on prompts of the same lengths: generate one by one, and its continuous batching."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    rng = random.Random(4)
    prompts = [[rng.randrange(300) for _ in range(n)] for n in lengths]
    tokens = arguments.answer_tokens
    config = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=-1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found = []
    started = time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    seconds = time.perf_counter() - started
    found.append({"case": "transformers, one by one", "requests_per_s": len(prompts) / seconds})
    try:
        started = time.perf_counter()
        outputs = model.generate_batch(inputs=prompts, generation_config=config)
        seconds = time.perf_counter() - started
        if len(outputs) != len(prompts):
            raise RuntimeError(f"{len(outputs)} of {len(prompts)} answers came")
        found.append({"case": "transformers, continuous batching", "requests_per_s": len(prompts) / seconds})
    except Exception as error:  # it is made for GPUs, and says in many ways that it does not run
        found.append({"case": "transformers, continuous batching", "error": f"{type(error).__name__}: {error}"[:200]})
    return found


def table(result: dict[str, Any]) -> str:
    lines = [f"# Many questions at once\n\n{json.dumps(result['hardware'])}\n\n{json.dumps(result['settings'])}\n"]
    lines.append("| case | clients or rate | requests/s | tokens/s | TTFT s | p95 | scheduling | hot |")
    lines.append("|---|---|---|---|---|---|---|---|")
    for case in result["cases"]:
        if "requests_per_s" not in case:
            continue
        load = f"{case['rate']:g}/s" if case.get("rate") else case.get("clients", "")
        cells = [case["case"], load, f"{case['requests_per_s']:.3f}"]
        for name, form in (
            ("tokens_per_s", ".1f"),
            ("ttft_s", ".2f"),
            ("ttft_p95_s", ".2f"),
            ("scheduling_share", ".2%"),
        ):
            cells.append(format(case[name], form) if name in case else "")
        cells.append(f"{case['hot_share']:.0%}" if "hot_share" in case else "")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", *(json.dumps(c) for c in result["cases"] if "requests_per_s" not in c)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
