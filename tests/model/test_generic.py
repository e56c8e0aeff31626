"""The generic path: models on transformers' own layers. Their parity is in test_parity.py; here is what makes an
unknown architecture safe, and what is the same as for every other model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub_generic
import pytest
import torch
from adapters import merge, write_adapter
from cacheblend_store import ChunkStore
from hub_models import HubModel
from parity import QUESTION, write_documents
from transformers import CONFIG_MAPPING, LlamaConfig, OlmoConfig, VaultGemmaConfig

from cacheblend_cli.blend.selectors import SELECTORS
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.generic_check import check_generic
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.families import spec_from_config
from cacheblend_cli.model.generic.decoder import GenericDecoder
from cacheblend_cli.model.generic.seam import KeyRule
from cacheblend_cli.model.loading import load_model
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

CPU = torch.device("cpu")
OLMO = HubModel("olmo", OlmoConfig)


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("olmo")
    OLMO.write(path)
    return path


def loaded(path: Path, dtype: str = "float32") -> GenericDecoder:
    decoder = load_model(path, "m", CPU, Precision(dtype), "torch").decoder
    assert isinstance(decoder, GenericDecoder)
    return decoder


def shifted(rows: torch.Tensor) -> torch.Tensor:
    """Every row and the one before it, as a convolution over the tokens has them. rows: [1, num_rows, width]."""
    return rows + rows.roll(1, dims=1)


def after(module: Any, change: Callable[[Any], Any]) -> None:
    module.register_forward_hook(lambda module, given, output: change(output))


def scores_that_grow(layer: Any) -> None:
    """Queries that positions are told apart by: what has no effect on the first ones."""

    def grow(module: Any, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        far = named["position_ids"]
        factor = 1.0 if far is None else 1 + (far // 100).float()[..., None]
        return given, named | {"hidden_states": named["hidden_states"] * factor}

    layer.self_attn.register_forward_pre_hook(grow, with_kwargs=True)


TAMPERED: dict[str, tuple[str, Callable[[Any], object]]] = {
    "the rows of an MLP see each other": ("layer 1", lambda m: after(m.model.layers[1].mlp, shifted)),
    "tokens see each other": ("its token embeddings depend on earlier tokens", lambda m: after(m.model.embed_tokens, shifted)),
    "another scale": ("layer 2 ", lambda m: setattr(m.model.layers[2].self_attn, "scaling", 0.1)),
    "the head sees a row beside": ("after its last layer", lambda m: after(m.lm_head, shifted)),
    "scores grow with positions": ("layer 0 ", lambda m: scores_that_grow(m.model.layers[0])),
}  # fmt: skip


@pytest.mark.parametrize("how", TAMPERED)
def test_what_is_not_computed_as_transformers_does_is_refused(olmo: Path, how: str) -> None:
    reason, tamper = TAMPERED[how]
    decoder = loaded(olmo)
    check_generic(decoder)
    tamper(decoder.parts.model)
    with pytest.raises(UsageError, match=reason):
        check_generic(decoder)


@pytest.mark.parametrize(
    "kind",
    [
        *("mamba", "mamba2", "jamba", "falcon_h1", "zamba2", "minimax", "kimi_linear", "recurrent_gemma"),
        *(
            "gpt2",
            "opt",
            "bloom",
            "mpt",
            "falcon",
            "bert",
            "t5",
            "bart",
            "deepseek_v32",
            "glm_moe_dsa",
            "longcat_flash",
            "musicgen",
        ),
    ],
)
def test_other_models_are_refused_by_their_config(kind: str) -> None:
    with pytest.raises(UsageError, match=f"model_type '{kind}'"):
        spec_from_config(CONFIG_MAPPING[kind]().to_dict() | {"model_type": kind})


def test_a_model_is_checked_when_an_engine_loads_it(tmp_path: Path) -> None:
    hub_generic.DIFFERENTIAL.write(tmp_path / "m")
    with pytest.raises(UsageError, match=hub_generic.DIFFERENTIAL.refused):
        Engine.load(EngineConfig(model=str(tmp_path / "m")))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", hub_generic.LAYER_NORM, ids=lambda model: model.name)
def test_a_model_with_layer_norms_passes_its_check_in_16_bits(model: HubModel, tmp_path: Path, dtype: str) -> None:
    """torch's layer_norm refuses rows in float32 beside weights in 16 bits."""
    model.write(tmp_path / "m")
    decoder = loaded(tmp_path / "m", dtype)
    before = {name: p.clone() for name, p in decoder.parts.model.named_parameters()}
    check_generic(decoder)
    for name, p in decoder.parts.model.named_parameters():
        assert p.dtype == before[name].dtype == decoder.dtype
        assert torch.equal(p, before[name]), name


def test_it_is_checked_once(olmo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the weights are the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checked: list[GenericDecoder] = []
    monkeypatch.setattr("cacheblend_cli.kv.generic_check.check_generic", checked.append)
    HubModel("m", OlmoConfig).write(tmp_path / "m", seed=1)
    for path in (olmo, olmo, tmp_path / "m", tmp_path / "m"):
        Engine.load(EngineConfig(model=str(path)))
    assert len(checked) == 2


def test_weights_that_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    from hub_models import add, tensors

    for number, (change, told) in enumerate([
        (add("model.layers.1.mlp.extra.weight", lambda held: torch.ones(4, 4)), r"layers\.1\.mlp\.extra\.weight"),
        (tensors(lambda held: held.pop("model.layers.1.mlp.up_proj.weight")), r"layers\.1\.mlp\.up_proj\.weight"),
    ]):  # fmt: skip
        path = tmp_path / str(number)
        HubModel("m", OlmoConfig, change=change).write(path)
        with pytest.raises(UsageError, match=told):
            load_model(path, "m", CPU, Precision("float32"), "torch")


def test_an_adapter_is_merged_into_the_weights(olmo: Path, tmp_path: Path) -> None:
    HubModel("m", OlmoConfig).write(tmp_path / "m")
    pairs = write_adapter(
        tmp_path / "a", tmp_path / "m", ["q_proj", "down_proj", "lm_head"], target_modules="all-linear"
    )
    adapted, plain = (
        load_model(tmp_path / "m", "m", CPU, Precision("float32"), "torch", a) for a in (tmp_path / "a", None)
    )
    assert adapted.fingerprint != plain.fingerprint
    merge(tmp_path / "m", pairs, {"": 4.0})
    merged = loaded(tmp_path / "m").parts.model.state_dict()
    assert isinstance(adapted.decoder, GenericDecoder)
    ours = adapted.decoder.parts.model.state_dict()
    assert len(pairs) == 7
    for name, weight in merged.items():
        assert torch.allclose(ours[name], weight, atol=1e-6), name


def test_an_adapter_of_another_model_is_refused(olmo: Path, tmp_path: Path) -> None:
    HubModel("m", LlamaConfig, {"hidden_size": 64}).write(tmp_path / "m")
    for name, checkpoint, module, told in (
        ("a", tmp_path / "m", "q_proj", "q_proj"),
        ("b", olmo, "embed_tokens", "embed_tokens"),
    ):
        write_adapter(tmp_path / name, checkpoint, [module])
        with pytest.raises(UsageError, match=told):
            load_model(olmo, "m", CPU, Precision("float32"), "torch", tmp_path / name)


def test_weights_of_whole_numbers_are_refused(olmo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--weight-dtype int8"):
        load_model(olmo, "m", CPU, Precision("float32", "int8"), "torch")


def test_windows_and_scales_are_found_on_the_model(tmp_path: Path) -> None:
    shape = {"head_dim": 8, "sliding_window": 24, "query_pre_attn_scalar": 4, "layer_types": hub_generic.MIXED}
    HubModel("m", VaultGemmaConfig, shape).write(tmp_path)
    decoder = loaded(tmp_path)
    assert decoder.spec.sliding_windows == (24, None, 24)
    assert [layer.attention.scale for layer in decoder.layers] == [0.5] * 3
    assert [layer.attention.sliding_window for layer in decoder.layers] == [24, None, 24]


def test_a_rule_that_hides_other_keys_is_no_window() -> None:
    causal = KeyRule(lambda b, h, q, k: k <= q)
    window = KeyRule(lambda b, h, q, k: (k <= q) & (k > q - 7))
    assert (causal.window(100), window.window(100), window.window(7)) == (None, 7, None)
    for rule in (
        lambda b, h, q, k: (k <= q) & (k // 10 == q // 10),  # chunks
        lambda b, h, q, k: k <= q + 1,
        lambda b, h, q, k: (k <= q) & ((k > q - 7) | (k < 4)),  # sinks of the first tokens
    ):
        with pytest.raises(ValueError, match="sees other keys"):
            KeyRule(rule).window(100)


def test_what_transformers_does_not_know_is_unknown() -> None:
    with pytest.raises(UsageError, match="no-such-model"):
        spec_from_config({"model_type": "no-such-model"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blending_all_is_a_full_prefill_with_every_selector(olmo: Path, tmp_path: Path, dtype: str) -> None:
    """Several of them are given what is before layer 0 and some what a check layer shows."""
    engine = Engine.load(EngineConfig(model=str(olmo), block_size=16, dtype=dtype, prompt="{chunks}\n\n{question}"))
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        documents = write_documents(tmp_path / "documents")
        engine.precompute(store, [str(documents)], PrecomputeOptions(chunk_tokens=40), lambda event: None)
        keys = [m.key for m in sorted(store.chunks(), key=lambda m: (m.source, m.index))][:4]

        def logits(blend: BlendParams) -> torch.Tensor:
            request = resolve(engine.runtime, store, AskRequest(QUESTION, keys, blend, SamplingParams(max_tokens=1)))
            done = prefill(engine.runtime, request)
            done.sequence.release()
            assert blend.mode == "full" or len(done.result.chosen) > 0
            return done.result.logits

        full = logits(BlendParams(mode="full"))
        allowed = (1e-4 if dtype == "float32" else 0.05) * float(full.abs().max())
        for selector in SELECTORS:
            if selector not in ("none", "all"):
                assert float((logits(BlendParams(ratio=1.0, selector=selector)) - full).abs().max()) <= allowed
                logits(BlendParams(ratio=0.3, selector=selector))
