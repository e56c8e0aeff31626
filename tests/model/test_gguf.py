"""GGUF files compute the same as their random checkpoints, and unsupported content is named."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import gguf
import gguf_families
import numpy as np
import pytest
import tokenizers
import torch
from checkpoints import FAMILY_CONFIGS, write_checkpoint
from gguf_files import SCALES, write_gguf
from hub_models import load_reference
from safetensors.torch import save_file
from text_tokenizers import SCRIPTS
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.errors import CacheBlendError, NotFoundError
from cacheblend_cli.model.checkpoint import tensor_source
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.gguf_files import conversion, reader
from cacheblend_cli.model.loading import LoadedModel, load_model
from cacheblend_cli.model.locate import resolve_model
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

pytestmark = pytest.mark.usefixtures("float_products")

TOLERANCE = 1e-4
RELATIVE_TOLERANCE = 5e-5  # float32 beside float64: Gemma 3 has 1.3e-5 or 1.8e-5, by the order of sums in its norms
GEMMA = next(family for family in gguf_families.FAMILIES if family.name == "gemma")
TEXT = "Mara leads billing in Bergen, since 2024 <|im_end|> and  keeps\n\ta parrot; naïve 東京 🦜 <tool_call>"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ARCHS = {
    "llama-gqa": "llama",
    "llama-mha-tied-bias": "llama",
    "llama3-rope": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3-mqa": "qwen3",
}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}  # rows of whole blocks of K-quants
OVERRIDES: dict[str, dict[str, Any]] = {"llama3-rope": {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer of a Gemma's GGUF file, and the one it was made of."""
    folder = tmp_path_factory.mktemp("gemma")
    family = replace(GEMMA, shape=GEMMA.shape | {"vocab_size": 800}, tokenizer="gemma")
    family.write(folder / "m", folder / "m.gguf")
    return load(folder / "m.gguf").tokenizer, Tokenizer(folder / "m")


def load(file: Path) -> LoadedModel:
    return load_model(resolve_model(str(file)), file.name, torch.device("cpu"), Precision("float32"), "torch")


def logits_of(file: Path) -> tuple[torch.Tensor, list[int]]:
    """Of every position of a prompt, and the prompt's ids."""
    engine = Engine.load(EngineConfig(model=str(file), dtype="float32", block_size=16))
    request = resolve(
        engine.runtime,
        None,
        AskRequest("where does Mara work? " * 8, (), BlendParams(mode="full"), SamplingParams(max_tokens=2)),
    )
    done = prefill(engine.runtime, request, output_positions=lambda plan: torch.arange(plan.num_tokens))
    done.sequence.release()
    return done.result.logits, done.plan.token_ids


def expected(checkpoint: Path, weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """transformers' logits over the checkpoint with these weights."""
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits[0]


def read_by_transformers(file: Path, ids: list[int]) -> torch.Tensor:
    """What transformers' own reader of GGUF files makes of it."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name), dtype=torch.float32
    ).eval()
    state = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        return model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits[0]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", ARCHS)
def test_a_gguf_file_computes_what_its_checkpoint_does(family: str, kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", family, **OVERRIDES.get(family, {}))
    file = tmp_path / "m.gguf"
    weights = write_gguf(tmp_path / "m", file, ARCHS[family], kind)
    logits, ids = logits_of(file)
    assert (logits - expected(tmp_path / "m", weights, ids)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("family", gguf_families.FAMILIES, ids=lambda family: family.name)
def test_a_gguf_file_of_another_family_too(family: gguf_families.GGUFFamily, tmp_path: Path) -> None:
    family.write(tmp_path / "m", tmp_path / "m.gguf")
    logits, ids = logits_of(tmp_path / "m.gguf")
    model = load_reference(tmp_path / "m")
    with torch.no_grad():
        there = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits[0]
    assert len(ids) > 100
    assert (logits - there).abs().max() <= RELATIVE_TOLERANCE * there.abs().max()


@pytest.mark.parametrize("family", ["llama-gqa", "qwen2", "qwen3"])
def test_it_is_read_as_transformers_reads_it(family: str, tmp_path: Path) -> None:
    # transformers passes over a width of heads in the file, so they are what it takes them to be
    write_checkpoint(tmp_path / "m", family, **({"head_dim": 128} if family == "qwen3" else {}))
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", ARCHS[family], "Q8_0")
    logits, ids = logits_of(tmp_path / "m.gguf")
    assert (logits - read_by_transformers(tmp_path / "m.gguf", ids)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *SCALES])
def test_every_kind_of_tensor_is_dequantised(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_cli.model.gguf_files.tensors.GGUFTensors.block_bytes", 20 << 10)  # 10 to 20 rows
    write_checkpoint(tmp_path / "m", "llama-gqa", **WIDE)
    weights = write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", kind)
    logits, ids = logits_of(tmp_path / "m.gguf")
    there = expected(tmp_path / "m", weights, ids)
    assert there.abs().max() > 0.5  # the drawn weights compute something
    assert (logits - there).abs().max() <= TOLERANCE


def test_rows_of_a_permuted_tensor_are_read_in_any_blocks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    weights = write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "Q8_0")
    source, name = tensor_source(resolve_model(str(tmp_path / "m.gguf"))), "model.layers.1.self_attn.q_proj.weight"
    for start, stop in ((0, 64), (0, 1), (7, 9), (15, 40), (63, 64)):
        assert torch.equal(source.read(name, start, stop), weights[name][start:stop])


def test_the_tokenizer_and_the_ends_of_an_answer_are_the_checkpoints(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "qwen2")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "qwen2", "F16")
    model, own = load(tmp_path / "m.gguf"), Tokenizer(tmp_path / "m")
    messages = [{"role": "user", "content": "where does Mara work?"}]
    assert model.tokenizer.render(messages, datetime.now(), {}).text == own.render(messages, datetime.now(), {}).text
    assert model.tokenizer.encode_template(TEXT) == own.encode_template(TEXT)
    assert model.tokenizer.encode_text(TEXT) == own.encode_text(TEXT)
    assert model.tokenizer.decode(model.tokenizer.encode_text(TEXT)) == TEXT
    assert model.eos_ids == {2}


def test_a_conversion_keeps_its_bytes(tmp_path: Path) -> None:
    """A tokenizer's fingerprint is that of its file: written otherwise, the same vocabulary would lose its chunks."""
    write_checkpoint(tmp_path / "m", "qwen2")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "qwen2", "F16")
    text = (resolve_model(str(tmp_path / "m.gguf")) / "tokenizer.json").read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=2)


def test_digits_stand_alone_where_the_file_says_so(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "qwen2")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "qwen2", "F16", pre="smollm")
    folder = resolve_model(str(tmp_path / "m.gguf"))
    cut = AutoTokenizer.from_pretrained(folder).backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 2024, it's")
    assert [piece for piece, _ in cut] == ["in", "Ġ", "2", "0", "2", "4", ",", "Ġit", "'s"]


def test_a_file_is_converted_once_and_a_changed_one_again(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F16")
    told: list[str] = []
    first = resolve_model(str(tmp_path / "m.gguf"), told.append)
    assert resolve_model(str(tmp_path / "m.gguf"), told.append) == first
    assert len(told) == 1
    assert "reading m.gguf for the first time" in told[0]
    before = load(tmp_path / "m.gguf").fingerprint
    write_checkpoint(tmp_path / "m", "llama-gqa", seed=1)
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F16")
    assert resolve_model(str(tmp_path / "m.gguf"), told.append) != first
    assert len(told) == 2
    assert load(tmp_path / "m.gguf").fingerprint != before


def test_nothing_half_converted_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F16")

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_index", fails)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(str(tmp_path / "m.gguf"))
    kept = resolve_model(str(tmp_path / "m.gguf"))
    assert [p.name for p in kept.parent.iterdir()] == [kept.name]


def test_a_home_that_cannot_be_written_costs_the_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F16")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load(tmp_path / "m.gguf").spec.num_layers == 4


def test_a_folder_with_one_gguf_file_is_a_model(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_gguf(tmp_path / "m", folder / "m.gguf", "llama", "F16")
    (folder / "mmproj-m.gguf").write_bytes(b"GGUF")
    assert load(folder).spec.num_layers == 4
    write_gguf(tmp_path / "m", folder / "n.gguf", "llama", "Q8_0")
    with pytest.raises(CacheBlendError, match="2 GGUF") as refused:
        resolve_model(str(folder))
    assert "m.gguf" in str(refused.value.hint)


def test_weights_of_transformers_come_before_a_gguf_file_beside_them(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m" / "m.gguf", "llama", "Q8_0")
    assert resolve_model(str(tmp_path / "m")) == tmp_path / "m"
    (tmp_path / "m" / "model.safetensors").unlink()
    assert load(tmp_path / "m").shown_path == tmp_path / "m" / "m.gguf"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts for all": ({"expert_shared_count": 1}, "llama.expert_shared_count = 1"),
    "experts, how many a token gets": ({"expert_count": 8}, "llama.expert_used_count"),
    "logit scale": ({"logit_scale": 0.5}, "llama.logit_scale"),
    "attention scale": ({"attention.scale": 0.5}, "llama.attention.scale"),
    "window": ({"attention.sliding_window": 128}, "llama.attention.sliding_window = 128"),
    "longrope": ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type"),
    "yarn's attention factor": ({"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 0.5}, "rope.scaling.attn_factor"),
    "partial rotary": ({"rope.dimension_count": 8}, "llama.rope.dimension_count = 8"),
    "heads that differ": ({"attention.head_count_kv": [2, 2, 1, 2]}, "llama.attention.head_count_kv"),
    "no width": ({"embedding_length": None}, "llama.embedding_length"),
    "a width of nothing": ({"embedding_length": 0}, "llama.embedding_length = 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_named(case: str, tmp_path: Path) -> None:
    extra, message = REFUSED[case]
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F16", extra=extra)
    with pytest.raises(CacheBlendError) as refused:
        load(tmp_path / "m.gguf")
    assert message in refused.value.message
    assert refused.value.hint
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("extra", "rope"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        ({"expert_count": 0, "rope.scaling.type": "none"}, {"rope_type": "default"}),
    ],
)
def test_scalings_of_rope(extra: dict[str, Any], rope: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F16", extra=extra)
    assert load(tmp_path / "m.gguf").spec.rope == {"rope_theta": 10000.0, **rope}


def test_factors_of_rope_that_no_llama_has_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa", rope_parameters=LLAMA3 | {"low_freq_factor": 2.0})
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F16")
    with pytest.raises(CacheBlendError, match=r"rope_freqs\.weight"):
        load(tmp_path / "m.gguf")


def test_a_text_is_cut_as_glm_4_cuts_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "qwen2")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "qwen2", "F16", pre="glm4")
    cut = tokenizers.Tokenizer.from_file(str(resolve_model(str(tmp_path / "m.gguf")) / "tokenizer.json")).pre_tokenizer
    assert [piece for piece, _ in cut.pre_tokenize_str("In 20245, IT'S")] == ["In", "Ġ", "202", "45", ",", "ĠIT", "'S"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("deepseek-llm", ["In", "Ġ", "20245", ",", "ĠIT", "'", "S", "Ċ"]),
        ("deepseek-coder", ["In", "Ġ", "2", "0", "2", "4", "5", ",", "ĠIT", "'", "S", "Ċ"]),
        ("deepseek-v3", ["In", "Ġ", "202", "45", ",", "ĠIT", "'S", "Ċ"]),
        (None, ["In", "Ġ", "202", "45", ",", "ĠIT", "'", "S", "Ċ"]),
    ],
)
def test_a_text_is_cut_as_llama_cpp_cuts_it(pre: str | None, pieces: list[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F16", pre=pre)
    cut = tokenizers.Tokenizer.from_file(str(resolve_model(str(tmp_path / "m.gguf")) / "tokenizer.json")).pre_tokenizer
    assert [piece for piece, _ in cut.pre_tokenize_str("In 20245, IT'S\n")] == pieces


@pytest.mark.parametrize(("pre", "words_first"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_words_of_the_vocabulary_come_before_merges_where_llama_cpp_takes_them_so(
    pre: str, words_first: bool, tmp_path: Path
) -> None:
    """Llama 3 has words that its merges do not lead to."""
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F16", pre=pre)
    data = json.loads((resolve_model(str(tmp_path / "m.gguf")) / "tokenizer.json").read_text())
    assert data["model"].get("ignore_merges", False) is words_first


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_a_gemmas_vocabulary_is_sentencepieces(text: str, gemma: tuple[Tokenizer, Tokenizer]) -> None:
    file, own = gemma
    assert file.encode_text(text) == own.encode_text(text)
    assert file.encode_template(f"<s>{text}") == own.encode_template(f"<s>{text}")


@pytest.mark.parametrize("pre", ["no-such-way", "poro-chat"])
def test_a_tokenizer_that_cuts_in_an_unknown_way_is_refused(pre: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F16", pre=pre)
    with pytest.raises(CacheBlendError, match=pre):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("arch", "dtype", "message"),
    [("mamba", np.float32, "'mamba'"), ("llama", np.float64, "F64")],
)
def test_architectures_and_tensors_without_a_reader_are_named(
    arch: str, dtype: type[np.generic], message: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((64, 64), dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CacheBlendError, match=message):
        load(tmp_path / "m.gguf")


def test_damaged_files_are_told(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F16")
    whole = (tmp_path / "m.gguf").read_bytes()
    size = f"{len(whole):,}"
    for name, content, message in (
        ("empty", b"", "empty file"),
        ("header", whole[:3001], "is truncated: it ends after 3,001 bytes, inside its header"),
        ("tensors", whole[:-4000], f"of the {size} bytes that its header promises, 4,000 are missing"),
        ("last", whole[:-1], f"of the {size} bytes that its header promises, 1 are missing"),
        ("other", b"PK" + whole[2:], "not a readable GGUF file"),
    ):
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(CacheBlendError) as told:
            load(tmp_path / f"{name}.gguf")
        assert told.value.exit_code == 2
        assert f"{name}.gguf" in told.value.message
        assert message in told.value.message
    with pytest.raises(NotFoundError, match=r"none\.gguf"):
        resolve_model(str(tmp_path / "none.gguf"))


def test_long_arrays_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of a file does not depend on it, and a file that ends in one is truncated."""
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F16")
    whole = reader.CheckedReader(tmp_path / "m.gguf")
    monkeypatch.setattr(reader, "LONG", 100)
    found = reader.CheckedReader(tmp_path / "m.gguf")
    assert [field[:2] + field[4:] for field in found.fields.values()] == [
        field[:2] + field[4:] for field in whole.fields.values()
    ]  # places, names and types
    assert [(t.name, t.data_offset, t.n_bytes) for t in found.tensors] == [
        (t.name, t.data_offset, t.n_bytes) for t in whole.tensors
    ]
    long = [name for name, field in found.fields.items() if len(field.parts) < len(whole.fields[name].parts)]
    assert {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"} <= set(long)
    for name in long:
        assert len(found.fields[name].data) == len(whole.fields[name].data) >= 100
        end = found.fields[name].offset + sum(part.nbytes for part in found.fields[name].parts)
        (tmp_path / "cut.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[: end - 3])
        with pytest.raises(EOFError, match="inside its header"):
            reader.CheckedReader(tmp_path / "cut.gguf")


def test_the_families_of_this_test_are_there() -> None:
    assert set(ARCHS) <= set(FAMILY_CONFIGS)
