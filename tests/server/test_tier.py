"""Two servers with stores of their own and one tier."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store.tier import SharedTier, open_tier
from command_line import ASK, Cli
from object_server import ObjectServer, object_server

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


def test_a_warm_answer_reports_the_tier_and_the_ratio_as_a_local_one(
    start: Any, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reports cross the socket as JSON and come back with their types."""
    monkeypatch.setenv("CACHEBLEND_TIER", f"file://{tmp_path}/tier")
    monkeypatch.setenv("CACHEBLEND_TIER_DEADLINE", str(LONG_S))
    assert cli("chunks", "push", f"{tmp_path}/tier").code == 0
    server = start(tier=SharedTier(open_tier(f"file://{tmp_path}/tier"), LONG_S))
    asked, records = (*ASK, "--json", "--max-tokens", "3", "--ratio", "auto"), []
    for flags in (["--dry-run"], ["--dry-run", "--local"], [], ["--local"]):
        assert cli("chunks", "prune", "--to-size", "0").code == 0
        answered = cli(*asked, *flags)
        assert answered.code == 0, answered.err
        records += answered.records
    plan, local_plan, ours, theirs = records
    assert plan["chunks"] == local_plan["chunks"]
    assert list(plan["auto"]) == list(local_plan["auto"]) == list(ours["auto"])
    assert ours["answer"] == theirs["answer"]
    assert list(ours["tier"]) == list(theirs["tier"])
    assert (ours["tier"]["found"], theirs["tier"]["found"]) == (3, 3)
    assert list(ours["auto"]) == list(theirs["auto"])
    assert server.state.engine.service.stats().finished == 1
