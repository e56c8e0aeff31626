"""A `cacheblend serve` process under 200 clients for an hour: some compare answers, some leave, some are slow, some are
hostile.

    python benchmarks/soak.py --minutes 60 --clients 200 [--model handbook] [--out benchmarks/results/soak.json]

Questions are asked alone first, twice. Then the clients of `soak_clients.py` ask them among everything else. Every ten
seconds the server's own memory, file descriptors, log and store are measured; results are written once a minute and at
the end. At the end streams are in progress while SIGTERM is sent.

Exits with 1 where an answer differs from the one asked alone, a reply is a 500 or of another status than expected, a
block of the KV pool is lost, memory or the store grows, the log holds a traceback, or the server does not end.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from machine import hardware
from soak_clients import PATIENCE_S, Body, Crowd, Tally, client, told

from cacheblend_cli.demo import handbook_dir

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [str(Path(sys.executable).parent / "cacheblend")]
QUOTA_MB = 64
STORE_SLACK = 32 << 20  # bytes beside KV and texts: the index, pages that are free, the catalogue
MEMORY_SLACK = 64 << 20
GRACE_S = 5
SAMPLE_S = 10.0
USED = 'blocks{state="used"}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument(
        "--think", type=float, default=20.0, help="mean seconds that a client waits between two requests"
    )
    parser.add_argument("--model", default="handbook")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/soak.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(Path(folder), arguments)
        try:
            asyncio.run(soak.run())
        finally:
            soak.kill()
            soak.write()
    print(table(soak.result))
    if soak.result["wrong"]:
        raise SystemExit("\n".join(soak.result["wrong"]))


class Soak:
    """A server over a store of its own, its clients, and what was measured. result: what is written."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self._folder, self._arguments, self._tally = folder, arguments, Tally()
        self._store, self._log = folder / "store", folder / "serve.log"
        self._samples: list[dict[str, Any]] = []
        self._server: subprocess.Popen[bytes] | None = None
        self.result: dict[str, Any] = {
            "hardware": hardware(), "model": arguments.model, "clients": arguments.clients, "minutes": arguments.minutes,
            "think_s": arguments.think, "quota_bytes": QUOTA_MB * 1_000_000, "finished": False, "wrong": [],
        }  # fmt: skip

    async def run(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        shared = ["--store", str(self._store), "--model", self._arguments.model]
        subprocess.run(
            [*COMMAND, "precompute", str(handbook_dir()), *shared, "--chunk-tokens", "128", "--max-size", f"{QUOTA_MB}MB", "-q"],
            check=True, env=environment, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        with self._log.open("wb") as log:
            serve = [
                *COMMAND,
                "serve",
                *shared,
                "--port",
                "0",
                "--grace",
                str(GRACE_S),
                "--threads",
                "1",
                "--no-retrieve",
            ]
            self._server = subprocess.Popen(serve, stdout=log, stderr=log, env=environment)
        port = await self._port()
        crowd = Crowd(port, self._tally, [], [])
        await self._ask_alone(crowd)
        clients = [
            asyncio.create_task(client(crowd, number, self._arguments.think))
            for number in range(self._arguments.clients)
        ]
        began = time.monotonic()
        last_written = began
        while (now := time.monotonic()) - began < 60 * self._arguments.minutes:
            await asyncio.sleep(min(SAMPLE_S, max(0.1, began + 60 * self._arguments.minutes - now)))
            await self._sample(crowd, time.monotonic() - began)
            if time.monotonic() - last_written > 60:
                last_written = time.monotonic()
                self.write()
            if self._server.poll() is not None:
                self._tally.found(f"the server ended with {self._server.returncode}")
                break
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        if self._server.poll() is None:
            await self._settle(crowd)
            await self._stop(crowd)
        self._judge()
        self.result["finished"] = True

    async def _port(self) -> int:
        """The port that the server says it listens on."""
        assert self._server is not None
        while True:
            if found := re.search(rb"http://127\.0\.0\.1:(\d+)", self._log.read_bytes()):
                return int(found[1])
            if self._server.poll() is not None:
                raise SystemExit(self._log.read_text())
            await asyncio.sleep(0.1)

    async def _ask_alone(self, crowd: Crowd) -> None:
        """The answers that all later ones are compared with; each question is asked twice, and has to be answered
        alike."""
        found = await crowd.send(
            "POST", "/v1/search", json.dumps({"query": "team lead search billing", "k": 24}).encode()
        )
        chunks = [hit["id"] for hit in found.json["data"]]
        for body in questions(chunks):
            first, second = told(await crowd.ask(body)), told(await crowd.ask(body))
            crowd.asked.append(body)
            crowd.answers.append(first)
            if first != second:
                self._tally.found(f"asked twice alone: {body!r}: {first!r}, then {second!r}")
        self.result["questions"] = len(crowd.asked)

    async def _sample(self, crowd: Crowd, at_s: float) -> None:
        assert self._server is not None
        began = time.monotonic()
        status, health_s = await asyncio.to_thread(health, crowd.port)
        if status != 200 and self._server.poll() is None:
            self._tally.found(f"/health: {status}")
        waited_s = time.monotonic() - began - health_s  # the clients' own event loop was busy
        with suppress(OSError):
            self._samples.append({
                "at_s": round(at_s), "health_s": round(health_s, 3), "clients_late_s": round(waited_s, 3), "memory": resident(self._server.pid),
                "descriptors": len(os.listdir(f"/proc/{self._server.pid}/fd")), "log": self._log.stat().st_size, "store": size(self._store),
            })  # fmt: skip

    async def _settle(self, crowd: Crowd) -> None:
        """Nobody asks any more: the engine ends everything and has all its blocks again."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            metrics = (await crowd.send("GET", "/metrics")).body.decode()
            values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("cacheblend_"))
            self.result["engine"] = {
                name.removeprefix("cacheblend_"): float(value) for name, value in values.items() if "bucket" not in name and "created" not in name
            }  # fmt: skip
            used, busy = (
                self.result["engine"][USED],
                self.result["engine"]["running"] + self.result["engine"]["waiting"],
            )
            if used <= 1 and not busy:
                return
            await asyncio.sleep(0.5)
        self._tally.found(f"blocks in use after everybody left: {used:g} (1 is the spare one), jobs: {busy:g}")

    async def _stop(self, crowd: Crowd) -> None:
        """SIGTERM with streams in progress: each ends with its last answer or an error, and the process ends."""
        assert self._server is not None
        long: Body = {
            "messages": [{"role": "user", "content": "Who?"}],
            "stream": True,
            "max_tokens": 1500,
            "ignore_eos": True,
        }
        streams = [asyncio.create_task(crowd.ask(long)) for _ in range(8)]
        await asyncio.sleep(3)
        self._server.send_signal(signal.SIGTERM)
        replies = await asyncio.gather(*streams)
        ended = sum(reply.body.endswith(b"data: [DONE]\n\n") for reply in replies)
        self.result["streams_at_sigterm"] = {"begun": len(replies), "ended_in_form": ended}
        if ended < len(replies):
            self._tally.found(f"{len(replies) - ended} streams broke off at SIGTERM")
        for _ in range(600):
            if self._server.poll() is not None:
                break
            await asyncio.sleep(0.1)
        self.result["exit"] = self._server.returncode
        if self._server.returncode != 0:
            self._tally.found(f"after SIGTERM the server ended with {self._server.returncode}")

    def _judge(self) -> None:
        log = self._log.read_text(errors="replace")
        self.result["log_bytes"], self.result["tracebacks"] = len(log), log.count("Traceback")
        if "Traceback" in log:
            self._tally.found("the log holds a traceback: " + log[log.index("Traceback") :][:400])
        quarter = max(1, len(self._samples) // 4)
        if len(self._samples) >= 4:
            before = max(s["memory"] for s in self._samples[quarter : 2 * quarter])
            after = max(s["memory"] for s in self._samples[-quarter:])
            if after > 1.1 * before + MEMORY_SLACK:
                self._tally.found(
                    f"memory grew from {before >> 20} MiB in the second quarter to {after >> 20} in the last"
                )
            if (largest := max(s["store"] for s in self._samples)) > self.result["quota_bytes"] * 1.25 + STORE_SLACK:
                self._tally.found(f"the store grew to {largest >> 20} MiB")
        check = subprocess.run(
            [*COMMAND, "chunks", "verify", "--store", str(self._store)], capture_output=True, text=True
        )
        self.result["chunks_verify"] = {"exit": check.returncode, "says": (check.stdout + check.stderr).strip()[-300:]}
        if check.returncode:
            self._tally.found(f"chunks verify: {check.returncode}")

    def kill(self) -> None:
        if self._server is not None and self._server.poll() is None:
            self._server.kill()
            self._server.wait()

    def write(self) -> None:
        """What is known by now, also as a table."""
        samples = self._samples
        step = max(1, len(samples) // 60)
        self.result |= {
            "counts": dict(sorted(self._tally.seen.items())), "wrong": self._tally.wrong, "num_wrong": self._tally.num_wrong,
            "seconds": samples[-1]["at_s"] if samples else 0, "most": {name: max(s[name] for s in samples) for name in samples[0]} if samples else {},
            "samples": samples[::step],
        }  # fmt: skip
        if self._log.exists() and self.result["wrong"]:
            self.result["log_end"] = self._log.read_text(errors="replace")[-2000:]
        out: Path = self._arguments.out
        new = out.with_suffix(".new")
        new.write_text(json.dumps(self.result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        new.rename(out)
        out.with_suffix(".md").write_text(table(self.result), encoding="utf-8")


def questions(chunks: list[str]) -> list[Body]:
    """Questions with one answer each. No composition of chunks is asked both blended and in full, so that no blended
    question finds exact KV that another one left in the pool."""
    asks = (
        "Who leads the search team?",
        "Where does the team meet?",
        "What does the lead of billing do?",
        "Which floor?",
    )
    bodies: list[Body] = []
    for i in range(8):
        ids = chunks[2 * i : 2 * i + 3]
        blend = ({"mode": "blend"}, {"mode": "full"}, {"mode": "blend", "ratio": 1.0}, {"mode": "reuse"})[i % 4]
        bodies += [
            {"messages": [{"role": "user", "content": asks[(i + j) % 4]}], "chunks": ids, "blend": blend}
            for j in range(2)
        ]
    bodies += [{"messages": [{"role": "user", "content": ask}]} for ask in asks]
    bodies += [
        {"messages": [{"role": "user", "content": asks[0]}], "temperature": 0.8, "seed": seed, "n": 2}
        for seed in (1, 2)
    ]
    turns = [
        {"role": "user", "content": asks[0]},
        {"role": "assistant", "content": "Mara"},
        {"role": "user", "content": asks[1]},
    ]
    bodies.append({"messages": turns})
    return [{"max_tokens": 12 + 5 * (i % 5), **body} for i, body in enumerate(bodies)]


def table(result: dict[str, Any]) -> str:
    most, samples = result.get("most", {}), result.get("samples", [])
    lines = [
        "# Soak", "", f"`python benchmarks/soak.py --minutes {result['minutes']:g} --clients {result['clients']}`, {result['model']}: {result['hardware']}", "",
        f"{'Finished' if result['finished'] else 'Not finished'} after {result.get('seconds', 0)} seconds; findings: {result.get('num_wrong', 0)}", "",
        "| what | count |", "|---|---|", *(f"| {name} | {count:,} |" for name, count in result.get("counts", {}).items()), "",
    ]  # fmt: skip
    if most:
        lines += [
            f"- the server's own memory: {most['memory'] >> 20} MiB at most; "
            f"{', '.join(str(s['memory'] >> 20) for s in samples[:: max(1, len(samples) // 20)])} over time",
            f"- file descriptors: {most['descriptors']} at most; /health: {most['health_s']} s at most; "
            f"the clients' own event loop was late by {most['clients_late_s']} s at most",
            f"- store: {most['store'] >> 20} MiB at most, with a quota of {result['quota_bytes'] / 1e6:g} MB; log: {most['log']:,} bytes",
        ]
    if result["finished"]:
        lines += [
            f"- blocks in use at the end: {result.get('engine', {}).get(USED)} (1 is the spare one)",
            f"- streams at SIGTERM: {result.get('streams_at_sigterm')}; exit code {result.get('exit')}; tracebacks: {result.get('tracebacks')}",
        ]
    lines += [f"- wrong: {what}" for what in result["wrong"][:10]]
    return "\n".join(lines) + "\n"


def health(port: int) -> tuple[int, float]:
    """Status of /health, 0 where none came, and the seconds it took: on a thread, so that busy clients do not count."""
    began, status = time.monotonic(), 0
    with suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", "/health")
        status = connection.getresponse().status
        connection.close()
    return status, time.monotonic() - began


def resident(pid: int) -> int:
    """Bytes of a process's own memory: pages of the store, which the kernel may take back, are not counted."""
    with open(f"/proc/{pid}/status", encoding="ascii") as stream:
        return next(int(line.split()[1]) * 1024 for line in stream if line.startswith("RssAnon"))


def size(folder: Path) -> int:
    """Bytes that the files of a folder take on the disk."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_blocks * 512
    return total


if __name__ == "__main__":
    main()
