"""A `cacheblend serve` process under 200 clients for an hour: most compare answers, some bring documents, some leave,
some are slow.

    python benchmarks/soak.py --minutes 60 --clients 200 [--model handbook]

Questions are asked alone first, twice. Then the clients ask them among everything else. Every ten seconds the server's
own memory, file descriptors, log and store are measured; results are written once a minute and at the end. At the end
streams are in progress while SIGTERM is sent. Hostile requests: `tests/server`.

Exits with 1 where an answer differs from the one asked alone, a reply is of another status than expected, a block of
the KV pool is lost, memory or the store grows, the log holds a traceback, or the server does not end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from machine import CLI, RESULTS, hardware, memory_kib, save, served, table

from cacheblend_cli.demo import handbook_dir

QUOTA_MB = 64
STORE_SLACK = 32 << 20  # bytes beside KV and texts: the index, pages that are free, the catalogue
MEMORY_SLACK = 64 << 20
SAMPLE_S, WRITE_S = 10.0, 60.0
USED = 'blocks{state="used"}'
CHAT, PATIENCE_S = "/v1/chat/completions", 300.0
WORDS = "harbor parrot ledger Bergen Mara billing keeps lead river stone".split()
Body = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--think", type=float, default=20.0, help="mean seconds between two requests of a client")
    parser.add_argument("--model", default="handbook")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        store, log = Path(folder) / "store", Path(folder) / "serve.log"
        shared = ["--store", str(store), "--model", arguments.model]
        limits = ["--chunk-tokens", "128", "--max-size", f"{QUOTA_MB}MB", "-q"]
        precompute = [*CLI, "precompute", str(handbook_dir()), *shared, *limits]
        subprocess.run(precompute, check=True, env=environment, stdout=subprocess.DEVNULL)
        with served([*shared, "--grace", "5", "--threads", "1", "--no-retrieve"], log, environment) as (server, port):
            soak = Soak(arguments, server, port, store, log)
            try:
                asyncio.run(soak.run())
            finally:
                soak.write()
    print(page(soak.result))
    if soak.result["wrong"]:
        raise SystemExit("\n".join(soak.result["wrong"]))


@dataclass
class Crowd:
    """What all clients share. asked: bodies whose answers are known; answers: those when asked alone; seen: counts by
    behaviour and outcome; wrong: the first findings, more are only counted."""

    http: httpx2.AsyncClient
    asked: list[Body] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def found(self, what: str) -> None:
        self.seen["wrong"] += 1
        if len(self.wrong) < 50:
            self.wrong.append(what[:500])

    async def ask(self, body: Body) -> httpx2.Response:
        return await self.http.post(CHAT, json=body)

    @asynccontextmanager
    async def stream(self, rng: random.Random, **more: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        """Ask for a stream. Yields its bytes."""
        body = {**rng.choice(self.asked), "stream": True, **more}
        async with self.http.stream("POST", CHAT, json=body) as reply:
            yield reply.aiter_raw(200)


def outcome(reply: httpx2.Response) -> Any:
    """Return texts and finish reasons, or an error of a stream."""
    if not reply.content.startswith(b"data: "):
        return [[choice["message"]["content"], choice["finish_reason"]] for choice in reply.json()["choices"]]
    records = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
    if error := next((record["error"] for record in records if "error" in record), None):
        return error
    choices: dict[int, list[str]] = {}
    for choice in (choice for record in records for choice in record["choices"]):
        own = choices.setdefault(choice["index"], ["", ""])
        own[0] += choice["delta"].get("content", "")
        own[1] = choice["finish_reason"] or own[1]
    return [choices[index] for index in sorted(choices)]


async def compares(crowd: Crowd, rng: random.Random) -> None:
    """Ask what was asked alone before: the answer is the same."""
    number = rng.randrange(len(crowd.asked))
    reply = await crowd.ask({**crowd.asked[number], "stream": rng.random() < 0.5})
    if reply.status_code != 200:
        expect(crowd, "compared", reply, 429)
        return
    same = outcome(reply) == crowd.answers[number]
    crowd.seen["answers equal to those asked alone" if same else "answers that differ"] += 1
    if not same:
        crowd.found(f"question {number}: {crowd.answers[number]!r} alone, now {outcome(reply)!r}")


async def brings_documents(crowd: Crowd, rng: random.Random) -> None:
    """Send documents that nobody has sent before: the store grows up to its quota."""
    text, message = " ".join(rng.choices(WORDS, k=rng.randint(20, 300))), {"role": "user", "content": "Who leads?"}
    body = {"messages": [message], "documents": [{"text": text}], "max_tokens": rng.randint(1, 30)}
    expect(crowd, "documents", await crowd.ask(body), 200, 429)


async def leaves(crowd: Crowd, rng: random.Random) -> None:
    """Begin to read a stream, or nothing, and go."""
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(rng.choice((0.01, 0.1, 1.0, 5.0))),
            crowd.stream(rng, max_tokens=400, ignore_eos=True) as pieces,
        ):
            await anext(pieces)
    crowd.seen["clients that left"] += 1


async def reads_slowly(crowd: Crowd, rng: random.Random) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(30), crowd.stream(rng, max_tokens=100, logprobs=True, top_logprobs=20) as pieces:
            async for _ in pieces:
                await asyncio.sleep(0.1)
    crowd.seen["slow readers"] += 1


async def never_reads(crowd: Crowd, rng: random.Random) -> None:
    async with crowd.stream(rng, n=4, max_tokens=100, logprobs=True, top_logprobs=20):
        await asyncio.sleep(rng.uniform(1, 20))
    crowd.seen["clients that never read"] += 1


BEHAVIOURS: dict[Callable[[Crowd, random.Random], Awaitable[None]], int] = {
    compares: 70, brings_documents: 10, leaves: 12, reads_slowly: 5, never_reads: 3
}  # fmt: skip
"""What a client does next, and how often."""


def expect(crowd: Crowd, what: str, reply: httpx2.Response, *statuses: int) -> None:
    crowd.seen[f"{what}: {reply.status_code}"] += 1
    if reply.status_code not in statuses:
        crowd.found(f"{what}: {reply.status_code}, {reply.content[:300]!r}")


async def client(crowd: Crowd, seed: int, think_s: float) -> None:
    """Do one thing after the other, until cancelled. think_s: mean seconds between them."""
    rng = random.Random(seed)
    await asyncio.sleep(rng.uniform(0, think_s))
    while True:
        [behaviour] = rng.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))
        try:
            await behaviour(crowd, rng)
            crowd.seen["exchanges"] += 1
        except httpx2.HTTPError as error:
            crowd.found(f"{behaviour.__name__}: {error!r}")
        await asyncio.sleep(rng.expovariate(1 / think_s))


class Soak:
    """A server over a store of its own, its clients, and what was measured. result: what is written."""

    def __init__(
        self, arguments: argparse.Namespace, server: subprocess.Popen[bytes], port: int, store: Path, log: Path
    ) -> None:
        self._arguments, self._server, self._store, self._log = arguments, server, store, log
        self._samples, limits = list[dict[str, Any]](), httpx2.Limits(max_connections=None)
        url = f"http://127.0.0.1:{port}"
        self._crowd = Crowd(httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits, trust_env=False))
        self.result: dict[str, Any] = {
            "hardware": hardware(), "model": arguments.model, "clients": arguments.clients, "minutes": arguments.minutes,
            "think_s": arguments.think, "quota_bytes": QUOTA_MB * 1_000_000, "finished": False, "wrong": [],
        }  # fmt: skip

    async def run(self) -> None:
        await self._ask_alone()
        began = written = time.monotonic()
        end = began + 60 * self._arguments.minutes
        numbers = range(self._arguments.clients)
        clients = [asyncio.create_task(client(self._crowd, n, self._arguments.think)) for n in numbers]
        while (now := time.monotonic()) < end and self._server.poll() is None:
            await asyncio.sleep(min(SAMPLE_S, max(0.1, end - now)))
            await self._sample(time.monotonic() - began)
            if time.monotonic() - written > WRITE_S:
                written = time.monotonic()
                self.write()
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        if self._server.poll() is None:
            await self._settle()
            await self._stop()
        else:
            self._crowd.found(f"the server ended with {self._server.returncode}")
        self._judge()
        self.result["finished"] = True

    async def _ask_alone(self) -> None:
        """Ask each question twice; the answers are those that all later ones are compared with."""
        query = {"query": "team lead search billing", "k": 24}
        found = await self._crowd.http.post("/v1/search", json=query)
        for body in questions([hit["id"] for hit in found.json()["data"]]):
            first, second = outcome(await self._crowd.ask(body)), outcome(await self._crowd.ask(body))
            self._crowd.asked.append(body)
            self._crowd.answers.append(first)
            if first != second:
                self._crowd.found(f"asked twice alone: {body!r}: {first!r}, then {second!r}")

    async def _sample(self, at_s: float) -> None:
        began = time.monotonic()
        reply = await self._crowd.http.get("/health")
        if reply.status_code != 200 and self._server.poll() is None:
            self._crowd.found(f"/health: {reply.status_code}")
        pid = self._server.pid
        with suppress(OSError, IndexError):
            self._samples.append({
                "at_s": round(at_s), "health_s": round(time.monotonic() - began, 3),
                "memory": memory_kib("RssAnon", pid) << 10, "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
                "log": self._log.stat().st_size, "store": size(self._store),
            })  # fmt: skip

    async def _settle(self) -> None:
        """Wait until the engine has ended everything and has all its blocks again."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            metrics = (await self._crowd.http.get("/metrics")).text
            values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("cacheblend_"))
            engine = {name.removeprefix("cacheblend_"): float(value) for name, value in values.items()}
            self.result["engine"] = {n: v for n, v in engine.items() if "bucket" not in n and "created" not in n}
            if engine[USED] <= 1 and not engine["running"] + engine["waiting"]:
                return
            await asyncio.sleep(0.5)
        self._crowd.found(f"blocks in use after everybody left: {engine[USED]:g} (1 is the spare one)")

    async def _stop(self) -> None:
        """Send SIGTERM with streams in progress: each ends with its last answer or an error, and the process ends."""
        message = [{"role": "user", "content": "Who?"}]
        long: Body = {"messages": message, "stream": True, "max_tokens": 1500, "ignore_eos": True}
        streams = [asyncio.create_task(self._crowd.ask(long)) for _ in range(8)]
        await asyncio.sleep(3)
        self._server.send_signal(signal.SIGTERM)
        replies = await asyncio.gather(*streams)
        ended = sum(reply.content.endswith(b"data: [DONE]\n\n") for reply in replies)
        self.result["streams_at_sigterm"] = {"begun": len(replies), "ended_in_form": ended}
        if ended < len(replies):
            self._crowd.found(f"{len(replies) - ended} streams broke off at SIGTERM")
        with suppress(subprocess.TimeoutExpired):
            self._server.wait(60)
        self.result["exit"] = self._server.returncode
        if self._server.returncode != 0:
            self._crowd.found(f"after SIGTERM the server ended with {self._server.returncode}")

    def _judge(self) -> None:
        log = self._log.read_text(errors="replace")
        self.result["tracebacks"] = log.count("Traceback")
        if "Traceback" in log:
            self._crowd.found("the log holds a traceback: " + log[log.index("Traceback") :][:400])
        quarter = max(1, len(self._samples) // 4)
        if len(self._samples) >= 4:
            before = max(s["memory"] for s in self._samples[quarter : 2 * quarter])
            after = max(s["memory"] for s in self._samples[-quarter:])
            if after > 1.1 * before + MEMORY_SLACK:
                grown = f"{before >> 20} MiB in the second quarter to {after >> 20} in the last"
                self._crowd.found(f"memory grew from {grown}")
            if (largest := max(s["store"] for s in self._samples)) > self.result["quota_bytes"] * 1.25 + STORE_SLACK:
                self._crowd.found(f"the store grew to {largest >> 20} MiB")
        check = subprocess.run([*CLI, "chunks", "verify", "--store", str(self._store)], capture_output=True, text=True)
        if check.returncode:
            self._crowd.found(f"chunks verify: {check.returncode}, {(check.stdout + check.stderr)[-300:]}")

    def write(self) -> None:
        """Write what is known by now."""
        samples = self._samples
        most = {name: max(s[name] for s in samples) for name in samples[0]} if samples else {}
        self.result |= {
            "counts": dict(sorted(self._crowd.seen.items())), "wrong": self._crowd.wrong,
            "seconds": most.get("at_s", 0), "most": most, "samples": samples[:: max(1, len(samples) // 60)],
        }  # fmt: skip
        save(self.result, self._arguments.out / "soak.json", page(self.result))


def questions(chunks: list[str]) -> list[Body]:
    """Return questions with one answer each. No composition of chunks is asked both blended and in full, so that no
    blended question finds exact KV that another one left in the pool."""
    asks = [
        {"role": "user", "content": text}
        for text in (
            "Who leads the search team?",
            "Where does the team meet?",
            "What does the lead of billing do?",
            "Which floor?",
        )
    ]
    blends: list[Body] = [{"mode": "blend"}, {"mode": "full"}, {"mode": "blend", "ratio": 1.0}, {"mode": "reuse"}]
    bodies: list[Body] = [
        {"messages": [asks[(i + j) % 4]], "chunks": chunks[2 * i : 2 * i + 3], "blend": blends[i % 4]}
        for i in range(8)
        for j in range(2)
    ]
    bodies += [{"messages": [ask]} for ask in asks]
    bodies += [{"messages": [asks[0]], "temperature": 0.8, "seed": seed, "n": 2} for seed in (1, 2)]
    bodies += [{"messages": [asks[0], {"role": "assistant", "content": "Mara"}, asks[1]]}]
    return [{"max_tokens": 12 + 5 * (i % 5), **body} for i, body in enumerate(bodies)]


def page(result: dict[str, Any]) -> str:
    most, samples = result.get("most", {}), result.get("samples", [])
    command = f"python benchmarks/soak.py --minutes {result['minutes']:g} --clients {result['clients']}"
    state = "Finished" if result["finished"] else "Not finished"
    lines = [
        *("# Soak", "", f"`{command}`, {result['model']}: {result['hardware']}", ""),
        *(f"{state} after {result.get('seconds', 0)} seconds; findings: {result['counts'].get('wrong', 0)}", ""),
        *table(("what", "count"), ((name, f"{count:,}") for name, count in result.get("counts", {}).items())),
        "",
    ]
    if most:
        memory = ", ".join(str(s["memory"] >> 20) for s in samples[:: max(1, len(samples) // 20)])
        lines += [
            f"- the server's own memory: {most['memory'] >> 20} MiB at most; {memory} over time",
            f"- file descriptors: {most['descriptors']} at most; /health: {most['health_s']} s at most",
            f"- store: {most['store'] >> 20} MiB at most, with a quota of {result['quota_bytes'] / 1e6:g} MB; "
            f"log: {most['log']:,} bytes",
        ]
    if result["finished"]:
        lines += [
            f"- blocks in use at the end: {result.get('engine', {}).get(USED)} (1 is the spare one)",
            f"- streams at SIGTERM: {result.get('streams_at_sigterm')}; exit code {result.get('exit')}; "
            f"tracebacks: {result.get('tracebacks')}",
        ]
    lines += ["", result["earlier"]] if "earlier" in result else []
    return "\n".join([*lines, *(f"- wrong: {what}" for what in result["wrong"][:10])]) + "\n"


def size(folder: Path) -> int:
    """Return the bytes that the files of a folder take on the disk."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_blocks * 512
    return total


if __name__ == "__main__":
    main()
