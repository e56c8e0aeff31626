"""The API's description: every route is in it, and replies to cases made from it are as it says."""

from __future__ import annotations

from typing import Any

import pytest
from ledger import Ledger
from starlette.routing import Route

from cacheblend_cli.server.app import make_app


def test_every_route_is_described(server: Any) -> None:
    described = server.client.get("/openapi.json").json()
    routes = {
        f"{method} {route.path.replace(':path', '')}"
        for route in make_app(server.state).routes
        if isinstance(route, Route) and "page" not in route.path and route.path not in ("/", "/mcp")
        for method in (route.methods or set()) - {"HEAD"}
    }
    told = {f"{method.upper()} {path}" for path, of in described["paths"].items() for method in of}
    assert told == routes
    body = described["components"]["schemas"]["ChatBody"]
    assert body["required"] == ["messages"]
    assert {"documents", "chunks", "search", "blend", "timeout_s"} <= set(body["properties"])
    assert body["additionalProperties"] is False


@pytest.mark.torture
def test_replies_are_as_described(server: Any) -> None:
    """schemathesis makes cases from the description, those that fit it and those that do not."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    schema = schemathesis.openapi.from_url(f"{server.client.base_url}/openapi.json")
    asked: dict[str, int] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in ("/openapi.json", "/metrics"):
            continue
        for mode in GenerationMode:

            @settings(
                max_examples=150,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                if isinstance(case.body, dict) and case.method == "POST":
                    case.body.setdefault("max_tokens", 2) if "completions" in case.path else None
                    if isinstance(case.body.get("timeout_s"), int | float):
                        del case.body["timeout_s"]  # 504 is right where it is too short
                case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=60)
                asked[case.path] = asked.get(case.path, 0) + 1

            try:
                check()
            except Exception as error:
                if "Unsatisfiable" not in type(error).__name__:
                    raise
    assert sum(asked.values()) > 1000, asked
    stats = server.state.engine.service.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    Ledger().add("HTTP API fuzzed by schemathesis", cases=sum(asked.values()), operations=len(asked))
