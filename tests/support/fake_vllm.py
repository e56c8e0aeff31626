"""Fake vLLM: the connector's base class, and a completions server that reads hand-overs."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any

import torch
from transformers import DynamicCache

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class KVConnectorBase_V1:
    """The interface of vLLM 0.32, without methods that are not called here."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._kv_transfer_config, self._metadata = vllm_config.kv_transfer_config, None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


def install(monkeypatch: Any, rank: int = 0, world: int = 1) -> None:
    """Make `vllm` importable, and `cacheblend_vllm.connector` anew."""
    parts = BASE.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    base, parallel = sys.modules[BASE], sys.modules["vllm.distributed"]
    for made in (
        KVConnectorBase_V1,
        KVConnectorTransferResults,
        type("KVConnectorMetadata", (), {}),
        type("SupportsHMA", (), {}),
    ):
        setattr(base, made.__name__, made)
    parallel.get_tensor_model_parallel_rank = lambda: rank  # type: ignore[attr-defined]
    parallel.get_tensor_model_parallel_world_size = lambda: world  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "cacheblend_vllm.connector", raising=False)


@dataclass
class FakeServer:
    """POST /v1/completions over transformers."""

    model: Any
    place: Any = None  # source of hand-overs
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)  # bodies
    loaded: list[int] = field(default_factory=list)  # tokens loaded as KV, per request
    cut_after: int | None = None  # tokens after which the connection breaks
    goes_on: threading.Event = field(default_factory=threading.Event)  # answers wait for it

    def __post_init__(self) -> None:
        self.goes_on.set()

    @torch.no_grad()
    def generate(self, body: dict[str, Any]) -> list[int]:
        from cacheblend_vllm.handover import HandOver

        ids, cache = torch.tensor([body["prompt"]]), DynamicCache(config=self.model.config)
        hand_over = HandOver.of(body.get("kv_transfer_params"))
        if hand_over is not None and hand_over.is_of(body["prompt"]):
            file = self.place.open(hand_over)
            for layer in range(self.model.config.num_hidden_layers):
                k, v = (x.transpose(0, 1)[None] for x in file.read(layer, 0, hand_over.num_tokens - 1))
                cache.update(k.to(self.model.dtype), v.to(self.model.dtype), layer)
        self.loaded.append(cache.get_seq_length())
        found = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=body["max_tokens"],
            do_sample=False, eos_token_id=body["stop_token_ids"] or None, pad_token_id=0,
        )  # fmt: skip
        return found[0, ids.shape[1] :].tolist()


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send(json.dumps({"data": [{"id": "tiny"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.requests.append(body)
            fake.goes_on.wait(20)
            try:
                ids = fake.generate(body)
            except Exception as error:
                self._send(str(error).encode(), 500)
                return
            cut = len(ids) if fake.cut_after is None else fake.cut_after
            records = [{"choices": [{"index": 0, "text": "", "token_ids": [i]}]} for i in ids[:cut]]
            text = "".join(f"data: {json.dumps(record)}\n\n" for record in records) + "data: [DONE]\n\n" * (
                cut == len(ids)
            )
            self._send(text.encode(), extra=len(ids) - cut)

        def _send(self, data: bytes, status: int = 200, extra: int = 0) -> None:
            """extra: bytes that are announced but not sent."""
            self.send_response(status)
            self.send_header("Content-Length", str(len(data) + extra))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
