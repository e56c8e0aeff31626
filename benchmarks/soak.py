"""Random arrivals, cancels, listeners that fail and a writer of the store beside them: nothing may go wrong that was not asked for.

    python benchmarks/soak.py --minutes 20 [--model handbook] [--out benchmarks/results/soak.md]

OutputProcessor with an error when a job fails that should not, a block is lost, or resident memory grows after the first quarter of the time by
more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cacheblend_store import ChunkStore
from machine import hardware

from cacheblend_cli.api import BlendConfig, Engine, EngineConfig, PrecomputeOptions, Question, SamplingParams
from cacheblend_cli.demo import handbook_dir
from cacheblend_cli.engine.async_engine import AsyncEngine
from cacheblend_cli.engine.jobs import Done, Event, Failed, Job, Limits, Text, Ticket
from cacheblend_cli.errors import QueueFull

POOL_TOKENS = 2500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--model", default="handbook")
    parser.add_argument("--rate", type=float, default=6.0, help="jobs a second")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/soak.md")
    arguments = parser.parse_args()
    engine = Engine.load(EngineConfig(model=arguments.model))
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder) / "store", mode="write") as store:
        documents = handbook_dir()
        engine.precompute(
            store, [str(documents)], PrecomputeOptions(chunk_tokens=128, context="sink"), lambda event: None
        )
        told, result = soak(engine, store, Path(folder), arguments)
    arguments.out.write_text(told)
    arguments.out.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    print(told)


def soak(engine: Engine, store: ChunkStore, folder: Path, arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """What is told of it, and its figures. Raises SystemExit with what went wrong."""
    rng, keys = random.Random(5), [m.key for m in store.chunks()]
    service = AsyncEngine(
        engine.runtime, store, Limits(max_waiting=40, max_sequences=12, max_rows=128, pool_tokens=POOL_TOKENS)
    )
    ended: Counter[str] = Counter()
    errors: list[Exception] = []
    live: list[Ticket] = []
    memory: list[int] = []
    over, log = threading.Event(), Log()
    logging.getLogger("cacheblend").addHandler(log)

    def heard_by(breaks: bool) -> object:
        def heard(event: Event) -> None:
            if isinstance(event, Failed):
                ended["failed"] += 1
                errors.append(event.error)
            elif isinstance(event, Done):
                ended[event.ended or "finished"] += 1
            elif breaks and isinstance(event, Text) and rng.random() < 0.3:
                raise ConnectionResetError("the client is gone")

        return heard

    def write() -> None:
        """Evicts and collects again, as a precompute beside the server does."""
        own, number = random.Random(6), 0
        while not over.wait(2.0):
            number += 1
            page = folder / "more" / f"{number % 5}.md"
            page.parent.mkdir(exist_ok=True)
            page.write_text(f"Page {number}. " + "Mara keeps the ledger of the harbor. " * own.randint(5, 30))
            store.evict_chunks(own.sample(keys, 2))
            paths = [str(page)]
            options = PrecomputeOptions(chunk_tokens=128, context="sink", force=True)
            service.run(lambda runtime, p=paths, o=options: engine.precompute(store, p, o, lambda event: None)).result()
            ended["pages written"] += 1

    writer = threading.Thread(target=write)
    writer.start()
    until, each_minute = time.monotonic() + 60 * arguments.minutes, [resident()]
    while (left := until - time.monotonic()) > 0:
        blend = rng.choice(
            (BlendConfig(), BlendConfig(mode="full"), BlendConfig(selector="hkvd"), BlendConfig(mode="reuse"))
        )
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 60),
            temperature=rng.choice((0.0, 1.0)),
            n=rng.choice((1, 1, 1, 3)),
            ignore_eos=True,
        )
        question = Question(f"who leads {rng.randint(0, 30)}?", rng.sample(keys, rng.randint(0, 5)), blend, sampling)
        job = Job(question, priority=rng.choice((0, 0, 1)), deadline_s=rng.choice((None, None, None, 0.5)))
        try:
            live.append(service.submit(job, heard_by(rng.random() < 0.1)))  # type: ignore[arg-type]
            ended["asked"] += 1
        except QueueFull:
            ended["refused, the queue was full"] += 1
        if rng.random() < 0.15:
            service.cancel(rng.choice(live[-20:]))
        del live[:-20]
        memory.append(resident())
        if left < 60 * (arguments.minutes - len(each_minute)):
            each_minute.append(memory[-1])
        time.sleep(rng.expovariate(arguments.rate))
    over.set()
    writer.join()
    service.close(120)
    stats = service.stats()
    quarter = max(memory[: max(1, len(memory) // 4)])
    lines = [
        "# Soak", "", f"{hardware()}", "", f"{arguments.minutes:g} minutes, {arguments.model}, a pool of {POOL_TOKENS} tokens", "",
        *(f"- {name}: {count}" for name, count in sorted(ended.items())),
        f"- preempted: {stats.preempted}; hot tokens: {stats.hot}; computed: {stats.computed}; reused: {stats.reused}",
        f"- blocks in use at the end: {stats.blocks_used} (1 is the spare one)",
        f"- resident memory: {quarter / 2**20:.0f} MiB at most in the first quarter, {max(memory) / 2**20:.0f} MiB at most, "
        f"{memory[-1] / 2**20:.0f} MiB at the end",
        f"- minute by minute: {', '.join(f'{m / 2**20:.0f}' for m in each_minute)}",
    ]  # fmt: skip
    told = "\n".join(lines) + "\n"
    finished = ended["finished"] + ended["cancelled"] + ended["deadline"]
    wrong = [f"the log says: {text}" for text in log.told if text != "a job's listener failed"][:3]
    if errors:
        wrong.append(f"{len(errors)} jobs failed, the first: {errors[0]!r}")
    if finished + ended["failed"] != ended["asked"]:
        wrong.append("a job did not end")
    if stats.blocks_used > 1:
        wrong.append("a block was lost")
    if max(memory) > 1.1 * quarter:
        wrong.append("memory grew")
    if wrong:
        raise SystemExit(told + "\n" + "; ".join(wrong))
    return told, {
        "hardware": hardware(),
        "minutes": arguments.minutes,
        "model": arguments.model,
        "pool_tokens": POOL_TOKENS,
        "ended": dict(ended),
        "stats": asdict(stats),
        "resident_each_minute": each_minute,
        "resident_most": max(memory),
        "resident_most_first_quarter": quarter,
    }


class Log(logging.Handler):
    """What the engine logs: faults of ours, and listeners that failed."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())
        if record.getMessage() != "a job's listener failed":
            logging.lastResort.emit(record)  # type: ignore[union-attr]


def resident() -> int:
    """Bytes of this process's own memory: pages of the store, which the kernel may take back, are not counted."""
    with open("/proc/self/status", encoding="ascii") as stream:
        return next(int(line.split()[1]) * 1024 for line in stream if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
