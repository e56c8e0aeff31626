"""Clients of the soak: some ask and compare, some leave, some are slow, some are hostile. A raw HTTP/1.1 client
each."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

CHAT = "/v1/chat/completions"
PATIENCE_S = 300.0  # for an answer: the queue may be long
CUT_OFF_S = 120.0  # within which the server must have closed a connection that sends too slowly
GONE = (ConnectionError, asyncio.IncompleteReadError, OSError)
WORDS = "harbor parrot ledger Bergen Mara billing keeps lead river stone".split()

Body = dict[str, Any]


@dataclass
class Tally:
    """seen: counts by behaviour and outcome. wrong: the first findings; more are only counted."""

    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_wrong: int = 0

    def found(self, what: str) -> None:
        self.num_wrong += 1
        self.seen["wrong"] += 1
        if len(self.wrong) < 50:
            self.wrong.append(what[:500])


@dataclass(frozen=True)
class Reply:
    """status 0: the connection was closed without a reply."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Crowd:
    """What all clients share. asked: bodies whose answers are known; answers: those when asked alone."""

    port: int
    tally: Tally
    asked: list[Body]
    answers: list[Any]

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with suppress(*GONE):
                await writer.wait_closed()

    async def send(self, method: str, path: str, body: bytes = b"", headers: str = "") -> Reply:
        """Send a request on a connection of its own. A server that closes before it has read everything is no error."""
        async with self.connected() as (reader, writer):
            with suppress(*GONE):
                writer.write(request(method, path, body, headers))
                await writer.drain()
            async with asyncio.timeout(PATIENCE_S):
                return await read_reply(reader)

    async def ask(self, body: Body) -> Reply:
        return await self.send("POST", CHAT, json.dumps(body).encode())

    def expect(self, what: str, reply: Reply, *statuses: int) -> None:
        self.tally.seen[f"{what}: {reply.status or 'closed'}"] += 1
        if reply.status not in statuses:
            self.tally.found(f"{what}: {reply.status}, {reply.body[:300]!r}")


def request(method: str, path: str, body: bytes = b"", headers: str = "") -> bytes:
    """headers: in the place of Content-Length, each ending in a line end."""
    length = headers or f"Content-Length: {len(body)}\r\n"
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}{length}\r\n".encode() + body


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """Read until the server closes."""
    data = b""
    with suppress(*GONE):
        while piece := await reader.read(1 << 16):
            data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    if not head:
        return Reply(0, b"")
    pieces, rest = [body], b""
    if b"transfer-encoding: chunked" in head.lower():
        pieces, rest = [], body
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        pieces.append(rest[: int(size or b"0", 16)])
        rest = rest[len(pieces[-1]) + 2 :] if pieces[-1] else b""
    return Reply(int(head.split(b" ", 2)[1]), b"".join(pieces))


def outcome(reply: Reply) -> Any:
    """Return texts and finish reasons, or an error of a stream."""
    if not reply.body.startswith(b"data: "):
        return [[choice["message"]["content"], choice["finish_reason"]] for choice in reply.json["choices"]]
    records = [json.loads(line[6:]) for line in reply.body.split(b"\n\n") if line.startswith(b"data: {")]
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
    if reply.status != 200:
        crowd.expect("compared", reply, 429)
        return
    same = outcome(reply) == crowd.answers[number]
    crowd.tally.seen["answers equal to those asked alone" if same else "answers that differ"] += 1
    if not same:
        crowd.tally.found(f"question {number}: {crowd.answers[number]!r} alone, now {outcome(reply)!r}")


async def brings_documents(crowd: Crowd, rng: random.Random) -> None:
    """Send documents that nobody has sent before: the store grows up to its quota."""
    text, message = " ".join(rng.choices(WORDS, k=rng.randint(20, 300))), {"role": "user", "content": "Who leads?"}
    body = {"messages": [message], "documents": [{"text": text}], "max_tokens": rng.randint(1, 30)}
    crowd.expect("documents", await crowd.ask(body), 200, 429)


async def puts_and_searches(crowd: Crowd, rng: random.Random) -> None:
    name, text = f"/v1/documents/soak-{rng.randrange(20)}", "Mara keeps the ledger of the harbor. " * rng.randint(5, 30)
    put = await crowd.send("PUT", name, json.dumps({"text": f"Page {rng.random()}. {text}"}).encode())
    crowd.expect("put", put, 200, 201, 429, 503)
    query = json.dumps({"query": rng.choice(WORDS), "k": 3}).encode()
    crowd.expect("search", await crowd.send("POST", "/v1/search", query), 200, 429)
    if rng.random() < 0.3:
        crowd.expect("delete", await crowd.send("DELETE", name), 200, 404, 429)


async def is_large(crowd: Crowd, rng: random.Random) -> None:
    """Ask for several answers, verified, or with a deadline."""
    message = {"role": "user", "content": "Who leads the search team?"}
    body = {"messages": [message], "search": {"k": 2}, "max_tokens": rng.randint(1, 60), "ignore_eos": True}
    more: list[Body] = [{"n": 4}, {"best_of": 8, "temperature": 1.0}, {"verify": True}, {"explain": True}]
    more += [{"timeout_s": rng.choice((0.001, 0.5, 5))}]
    crowd.expect("large", await crowd.ask(body | rng.choice(more)), 200, 429, 504)


async def leaves(crowd: Crowd, rng: random.Random) -> None:
    """Begin to read a stream, or nothing, and go."""
    async with begun(crowd, rng, max_tokens=400, ignore_eos=True) as reader:
        with suppress(TimeoutError, *GONE):
            async with asyncio.timeout(rng.choice((0.0, 0.1, 1.0, 5.0))):
                await reader.read(rng.choice((1, 500, 5000)))
    crowd.tally.seen["clients that left"] += 1


async def reads_slowly(crowd: Crowd, rng: random.Random) -> None:
    async with begun(crowd, rng, max_tokens=100, logprobs=True, top_logprobs=20) as reader:
        with suppress(TimeoutError, *GONE):
            async with asyncio.timeout(30):
                while await reader.read(200):
                    await asyncio.sleep(0.1)
    crowd.tally.seen["slow readers"] += 1


async def never_reads(crowd: Crowd, rng: random.Random) -> None:
    async with begun(crowd, rng, paused=True, n=4, max_tokens=100, logprobs=True, top_logprobs=20):
        await asyncio.sleep(rng.uniform(1, 20))
    crowd.tally.seen["clients that never read"] += 1


@asynccontextmanager
async def begun(
    crowd: Crowd, rng: random.Random, paused: bool = False, **more: Any
) -> AsyncIterator[asyncio.StreamReader]:
    """Ask for a stream."""
    body = {**rng.choice(crowd.asked), "stream": True, **more}
    async with crowd.connected() as (reader, writer):
        if paused:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request("POST", CHAT, json.dumps(body).encode()))
        await writer.drain()
        yield reader


async def half_sends(crowd: Crowd, rng: random.Random) -> None:
    """Send part of the headers, or of the body: the server closes."""
    partial = request("POST", CHAT, b"{", "Content-Length: 5000\r\n")
    part = rng.choice((b"", b"POST /v1/cha", request("POST", CHAT)[:-2], partial))
    async with crowd.connected() as (reader, writer):
        with suppress(*GONE):
            writer.write(part)
            await writer.drain()
        try:
            async with asyncio.timeout(CUT_OFF_S):
                await read_reply(reader)
            crowd.tally.seen["half-sent requests closed"] += 1
        except TimeoutError:
            crowd.tally.found(f"a half-sent request was not closed: {part!r}")


async def sends_nonsense(crowd: Crowd, rng: random.Random) -> None:
    """Send wrong types, deep JSON, lengths that are wrong: 4xx or a closed connection, never 5xx."""
    chat = b'{"messages":[{"role":"user","content":"x"}],%s}'
    schema, many = b'"response_format":{"type":"json_schema","json_schema":{"schema":', rng.choice((1000, 300_000))
    kinds: dict[str, tuple[bytes, str]] = {
        "type errors": (b'{"messages":[' + b"{}," * many + b"{}]}", ""),
        "wrong elements": (chat % (b'"stop":[' + b"0," * many + b"0]"), ""),
        "huge stop": (chat % (b'"stop":"' + b"z" * (many * 10) + b'"'), ""),
        "many stops": (chat % (b'"stop":[' + b'"z",' * many + b'"z"]'), ""),
        "deep JSON": (chat % (b'"user":' + b"[" * (10 * many) + b"]" * (10 * many)), ""),
        "deep schema": (chat % (schema + b'{"a":' * 500 + b"1" + b"}" * 502), ""),
        "not JSON": (rng.randbytes(rng.randint(1, 5000)), ""),
        "length too short": (chat % b'"n":1', "Content-Length: 7\r\n"),
        "two lengths": (chat % b'"n":1', "Content-Length: 7\r\nContent-Length: 9\r\n"),
        "negative length": (chat % b'"n":1', "Content-Length: -1\r\n"),
        "length beside chunks": (b"2\r\n{}\r\n0\r\n\r\n", "Content-Length: 12\r\nTransfer-Encoding: chunked\r\n"),
        "bad chunks": (b"zz\r\n{}\r\n", "Transfer-Encoding: chunked\r\n"),
        "too large": (b"", "Content-Length: 99999999999\r\n"),
        "large headers": (b"", "X-Large: " + "a" * 100_000 + "\r\n"),
    }
    name = rng.choice(sorted(kinds))
    crowd.expect(f"hostile: {name}", await crowd.send("POST", CHAT, *kinds[name]), 0, 400, 413, 431)


async def is_refused(crowd: Crowd, rng: random.Random) -> None:
    """Send requests that are well formed and cannot be done."""
    question = [{"role": "user", "content": "Who leads?"}]
    bodies: list[tuple[Body, int]] = [
        ({"messages": [{"role": "user", "content": "Mara " * 20_000}]}, 400),
        ({"messages": question, "documents": [{"text": f"{rng.random()} " + "Mara leads. " * 20_000}]}, 400),
        ({"messages": question, "model": "gpt-5"}, 404),
        ({"messages": question, "chunks": ["ffffffffffffffff"]}, 404),
        ({"messages": question, "temperature": -1}, 400),
        ({"messages": question, "regex": "("}, 400),
        ({"messages": [{"role": "system", "content": "a"}, *question], "max_tokens": 2}, 200),
    ]
    body, status = rng.choice(bodies)
    crowd.expect("refused", await crowd.ask(body), status, 429)


BEHAVIOURS: dict[Callable[[Crowd, random.Random], Awaitable[None]], int] = {
    compares: 50, brings_documents: 6, puts_and_searches: 5, is_large: 6, leaves: 9, reads_slowly: 4, never_reads: 3,
    half_sends: 4, sends_nonsense: 8, is_refused: 5,
}  # fmt: skip
"""What a client does next, and how often."""


async def client(crowd: Crowd, seed: int, think_s: float) -> None:
    """Do one thing after the other, until cancelled. think_s: mean seconds between them."""
    rng, behaviours = random.Random(seed), list(BEHAVIOURS)
    await asyncio.sleep(rng.uniform(0, think_s))
    while True:
        [behaviour] = rng.choices(behaviours, list(BEHAVIOURS.values()))
        try:
            await behaviour(crowd, rng)
            crowd.tally.seen["exchanges"] += 1
        except TimeoutError:
            crowd.tally.found(f"{behaviour.__name__}: no end within {PATIENCE_S:g} seconds")
        except GONE as error:
            crowd.tally.found(f"{behaviour.__name__}: {error!r}")
        await asyncio.sleep(rng.expovariate(1 / think_s))
