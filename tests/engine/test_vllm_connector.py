"""The vLLM connector against a small fake of its base class: its replies to the scheduler, and the places it writes
to."""

from __future__ import annotations

from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
import torch
from cacheblend_vllm.files import HandOverDirectory, HandOverFile
from checkpoints import write_checkpoint

from cacheblend_cli.errors import DeviceError
from cacheblend_cli.kv.export import KVReader, export
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.loading import load_model

N, BLOCK = 40, 16
IDS = list(range(5, 5 + N))


class Layer:
    """An attention layer of vLLM: its implementation writes rows to slots."""

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        self.num_kv_heads, self.impl = num_kv_heads, self
        self.kv_cache = torch.zeros(2, 8 * BLOCK, num_kv_heads, head_dim)

    def do_kv_cache_update(
        self, layer: Any, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        cache[0, slots], cache[1, slots] = k, v


def request(params: dict[str, Any], ids: list[int] = IDS, answered: int = 0) -> Any:
    return SimpleNamespace(
        request_id="r", kv_transfer_params=params, prompt_token_ids=ids, num_tokens=len(ids) + answered
    )


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp("m")
    write_checkpoint(path, "llama-gqa")
    return load_model(path, "m", torch.device("cpu"), Precision("bfloat16"), "torch").decoder


@pytest.fixture
def kv(decoder: Decoder) -> KVReader:
    """Random KV of N tokens."""
    pool = KVPool.of(decoder, 6, BLOCK)
    torch.manual_seed(0)
    for held in pool.tensors:
        held.normal_()
    return export(decoder, pool.new_sequence(N), N)


@pytest.fixture
def file(tmp_path: Path, kv: KVReader) -> HandOverFile:
    made = HandOverDirectory(tmp_path / "d").new()
    made.hand_over(IDS, kv)
    return made


def connector_of(directory: Path, groups: list[list[int]], layers: dict[str, Layer] | None = None) -> Any:
    """groups: numbers of the layers of each KV cache group."""
    from cacheblend_vllm.connector import CacheBlendConnector

    extra = {"directory": str(directory)}
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32),
        compilation_config=SimpleNamespace(static_forward_context=layers or {}),
        kv_transfer_config=SimpleNamespace(get_from_extra_config=lambda name, default: extra.get(name, default)),
    )
    specs = [
        SimpleNamespace(
            layer_names=[f"model.layers.{i}.self_attn.attn" for i in group],
            kv_cache_spec=SimpleNamespace(block_size=BLOCK),
        )
        for group in groups
    ]
    return CacheBlendConnector(config, None, SimpleNamespace(kv_cache_groups=specs))


def schedule(connector: Any, asked: Any, computed: int, block_ids: tuple[list[int], ...]) -> int:
    """A scheduler's step with the request; the worker gets its metadata."""
    count, later = connector.get_num_new_matched_tokens(asked, computed)
    assert later is (count > 0)
    connector.update_state_after_alloc(asked, SimpleNamespace(get_block_ids=lambda: block_ids), count)
    connector.bind_connector_metadata(connector.build_connector_meta(None))
    return count


def loads(connector: Any) -> bool:
    """The worker's step: whether what was begun has been loaded."""
    connector.start_load_kv(None)
    wait([reading for _, reading in connector._fetching.values()])
    results = connector.get_transfer_results(set())
    assert results.finished_recving == {"r"}, "also where it failed"
    connector.update_connector_output(results)
    return not results.failed_recving


def layers_of(decoder: Decoder, heads: int = 2) -> dict[str, Layer]:
    spec = decoder.spec
    return {f"model.layers.{i}.self_attn.attn": Layer(heads, spec.head_dim) for i in range(spec.num_layers)}


def test_a_prompt_is_written_to_its_blocks(
    monkeypatch: Any, file: HandOverFile, kv: KVReader, decoder: Decoder, tmp_path: Path
) -> None:
    fake_vllm.install(monkeypatch)
    layers = layers_of(decoder)
    connector = connector_of(tmp_path / "d", [[0, 1, 2, 3]], layers)
    assert schedule(connector, request(file.params), BLOCK, ([7, 2, 5],)) == N - 1 - BLOCK, "the last token is computed"
    assert loads(connector)
    for theirs, ours in zip(layers.values(), kv, strict=True):
        for held, own in zip(theirs.kv_cache, (ours.k.float(), ours.v.float()), strict=True):
            assert torch.equal(held[2 * BLOCK : 3 * BLOCK], own[BLOCK : 2 * BLOCK])
            assert torch.equal(held[5 * BLOCK : 5 * BLOCK + N - 1 - 2 * BLOCK], own[2 * BLOCK : N - 1])
            assert not held[7 * BLOCK :].any(), "blocks that vLLM has already are not written"


def test_a_hand_over_that_is_gone_is_not_tried_again(
    monkeypatch: Any, file: HandOverFile, decoder: Decoder, tmp_path: Path
) -> None:
    fake_vllm.install(monkeypatch)
    connector, asked = connector_of(tmp_path / "d", [[0, 1, 2, 3]], layers_of(decoder)), request(file.params)
    assert schedule(connector, asked, 0, ([1, 2, 3],)) == N - 1
    [path] = (tmp_path / "d").iterdir()
    held = path.read_bytes()
    file.remove()
    assert not loads(connector)
    path.write_bytes(held)
    assert schedule(connector, asked, 0, ([1, 2, 3],)) == 0
    connector.request_finished(asked, [])
    assert schedule(connector, asked, 0, ([1, 2, 3],)) == N - 1
    assert loads(connector)


def test_a_preempted_request_is_loaded_again_with_its_last_token(
    monkeypatch: Any, file: HandOverFile, tmp_path: Path
) -> None:
    fake_vllm.install(monkeypatch)
    connector = connector_of(tmp_path / "d", [[0, 1, 2, 3]])
    assert schedule(connector, request(file.params, answered=3), 0, ([1, 2, 3],)) == N
    assert schedule(connector, request(file.params, answered=3), N, ([1, 2, 3],)) == 0
    assert connector.request_finished_all_groups(request(file.params), ([1],)) == (False, None)


def test_blocks_behind_a_window_are_left_out(
    monkeypatch: Any, file: HandOverFile, kv: KVReader, decoder: Decoder, tmp_path: Path
) -> None:
    fake_vllm.install(monkeypatch)
    layers = layers_of(decoder)
    connector = connector_of(tmp_path / "d", [[0, 2], [1, 3]], layers)
    schedule(connector, request(file.params), 0, ([1, 2, 3], [0, 0, 4]))
    assert loads(connector)
    held = layers["model.layers.1.self_attn.attn"].kv_cache[0]
    assert not held[: 4 * BLOCK].any()
    assert torch.equal(held[4 * BLOCK : 4 * BLOCK + 7], kv.layer(1).k[2 * BLOCK : N - 1].float())
    assert layers["model.layers.0.self_attn.attn"].kv_cache[0, BLOCK : 3 * BLOCK].any()


@pytest.mark.parametrize(("rank", "world", "heads", "first"), [(1, 2, 1, 1), (0, 2, 1, 0), (3, 4, 1, 1), (1, 4, 1, 0)])
def test_each_rank_takes_its_heads(
    monkeypatch: Any, file: HandOverFile, kv: KVReader, decoder: Decoder, tmp_path: Path, rank: int, world: int, heads: int, first: int
) -> None:  # fmt: skip
    fake_vllm.install(monkeypatch, rank, world)
    layers = layers_of(decoder, heads)
    connector = connector_of(tmp_path / "d", [[0, 1, 2, 3]], layers)
    schedule(connector, request(file.params), 0, ([1, 2, 3],))
    assert loads(connector)
    held = layers["model.layers.0.self_attn.attn"].kv_cache[1]
    assert torch.equal(held[BLOCK : BLOCK + 5], kv.layer(0).v[:5, first : first + 1].float())


def test_what_is_not_this_prompts_is_not_taken(monkeypatch: Any, file: HandOverFile, tmp_path: Path) -> None:
    fake_vllm.install(monkeypatch)
    connector = connector_of(tmp_path / "d", [[0, 1, 2, 3]])
    own = file.params["cacheblend"]
    for params in (
        None,
        {},
        {"cacheblend": 3},
        {"cacheblend": {**own, "id": "../" + own["id"][3:]}},
        {"cacheblend": {**own, "id": "0" * 32}},
    ):
        assert connector.get_num_new_matched_tokens(request(params), 0) == (0, False)  # type: ignore[arg-type]
    assert connector.get_num_new_matched_tokens(request(file.params, [*IDS[:-1], 3]), 0) == (0, False)
    lied = request({"cacheblend": {**own, "digest": fake_digest([3] * N)}}, [3] * N)
    assert schedule(connector, lied, 0, ([1, 2, 3],)) == N - 1
    assert not loads(connector), "the file is of another prompt"


def fake_digest(ids: list[int]) -> str:
    from cacheblend_vllm.handover import digest_of

    return digest_of(ids)


def test_a_cut_file_is_computed(monkeypatch: Any, file: HandOverFile, decoder: Decoder, tmp_path: Path) -> None:
    fake_vllm.install(monkeypatch)
    connector = connector_of(tmp_path / "d", [[0, 1, 2, 3]], layers_of(decoder))
    [path] = (tmp_path / "d").iterdir()
    for size in (path.stat().st_size - 100, 900, 6):
        with path.open("r+b") as cut:
            cut.truncate(size)
        schedule(connector, request(file.params), 0, ([1, 2, 3],))
        assert not loads(connector)
        connector.request_finished(request(file.params), [])


def test_no_room_for_the_file(monkeypatch: Any, tmp_path: Path, kv: KVReader) -> None:
    directory = HandOverDirectory(tmp_path / "d")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(DeviceError):
        directory.new().hand_over(IDS, kv)
    assert list((tmp_path / "d").iterdir()) == []
