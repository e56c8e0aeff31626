"""Two servers with stores of their own and one tier."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store.tier import SharedTier, open_tier
from object_server import ObjectServer, object_server

from cacheblend_cli.collect.collector import Collector

LONG_S = 60.0  # no test waits for it: requests end before
DOCUMENTS = [{"text": f"page {i}: the lead of billing is Mara, who moved to Bergen in year {i}"} for i in range(3)]


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server(tmp_path / "objects") as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def pair(start: Any, objects: ObjectServer) -> list[Any]:
    """Two servers; the first one has answered over DOCUMENTS, and their KV is in the tier."""
    servers = [start(tier=SharedTier(open_tier("s3://kv-test/team"), LONG_S)) for _ in range(2)]
    servers[0].reply = servers[0].ask(documents=DOCUMENTS).json()
    tier = servers[0].state.store.tier
    assert tier.flush(LONG_S) == 0
    assert tier.counts.puts >= len(DOCUMENTS)
    return servers


def answer(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


def metric(server: Any, name: str) -> float:
    [value] = re.findall(rf"^cacheblend_tier_{name} (\S+)$", server.state.metrics.text().decode(), re.MULTILINE)
    return float(value)


def test_documents_of_one_are_hits_of_the_other(pair: list[Any], objects: ObjectServer) -> None:
    one, two = pair
    again = one.ask(documents=DOCUMENTS).json()
    found = two.ask(documents=DOCUMENTS).json()
    assert answer(found) == answer(again)
    assert metric(two, "hits_total") >= len(DOCUMENTS)
    assert metric(two, "read_bytes_total") > 0
    assert metric(two, "read_seconds_total") > 0
    assert metric(two, "failed_total") == 0
    assert metric(one, "put_bytes_total") > 0


@pytest.mark.parametrize("fault", ["fails", "refuses", "damaged"])
def test_no_answer_fails_for_the_tier(pair: list[Any], objects: ObjectServer, fault: str) -> None:
    one, two = pair

    def damage() -> None:
        for file in objects.objects():
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)

    faults: dict[str, Callable[[], None]] = {
        "fails": lambda: setattr(objects, "status", 500),
        "refuses": lambda: setattr(objects, "status", 403),
        "damaged": damage,
    }
    faults[fault]()
    found = two.ask(documents=DOCUMENTS)
    assert found.status_code == 200
    assert answer(found.json()) == answer(one.reply)  # computed, as the first one did
    assert two.ask(documents=DOCUMENTS).status_code == 200
    assert metric(two, "refused_total" if fault == "damaged" else "failed_total") >= 3
    assert metric(two, "resting") == (fault != "damaged")


PAGES = "\n\n".join(
    f"The lead of billing in year {i} is Mara, who moved to Bergen with {7 * i} others." for i in range(12)
)


def put(server: Any, name: str = "handbook", text: str = PAGES) -> dict[str, Any]:
    reply = server.client.put(f"/v1/documents/{name}", json={"text": text})
    assert reply.status_code in (200, 201)
    found: dict[str, Any] = reply.json()
    return found


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Keys of the chunks that are computed from now on."""
    keys, collect = list[bytes](), Collector.collect

    def noted(self: Collector, chunks: Any) -> Any:
        keys.extend(chunk.key for chunk in chunks)
        return collect(self, chunks)

    monkeypatch.setattr(Collector, "collect", noted)
    return keys


def test_a_document_put_to_the_other_comes_from_the_tier(
    start: Any, objects: ObjectServer, collected: list[bytes]
) -> None:
    one, two = (start(tier=SharedTier(open_tier("s3://kv-test/team"), LONG_S)) for _ in range(2))
    chunks = [chunk["id"] for chunk in put(one)["chunks"]]
    assert len(collected) == len(chunks) > 3
    assert one.state.store.tier.flush(LONG_S) == 0
    collected.clear()
    assert (
        put(two)["chunks"] == put(start(), "other")["chunks"]
    )  # new ones, as those that a server without a tier computes
    assert {key.hex() for key in collected} == set(chunks)  # of the third server
    with two.state.store.read() as reader:
        assert all(reader.undamaged(bytes.fromhex(key)).has_kv for key in chunks)


def test_a_document_is_computed_where_the_tier_fails(start: Any, objects: ObjectServer, collected: list[bytes]) -> None:
    one, two = (start(tier=SharedTier(open_tier("s3://kv-test/team"), LONG_S)) for _ in range(2))
    put(one)
    assert one.state.store.tier.flush(LONG_S) == 0
    for file in objects.objects():
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    collected.clear()
    assert len(put(two)["chunks"]) == len(collected)
