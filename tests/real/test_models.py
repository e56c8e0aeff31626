"""Published models: logits of transformers over the same file, prompts, blending, llama.cpp behind it, and the model
check."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import pytest
import torch
from cacheblend_store import ChunkStore
from real_packages import EACH_MODEL
from real_packages import gguf as gguf_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils.chat_template_utils import render_jinja_template

from cacheblend_cli.cli.main import run
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import Prefilled, prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.model.gguf_files import reader  # noqa: F401 a subclass of GGUFReader: made before that is replaced below
from cacheblend_cli.prompt.template import split_template
from cacheblend_cli.prompt.wording import Wording
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

pytestmark = pytest.mark.real
TOLERANCE = 2e-3  # of logits up to some 30, in float32
QUESTION = "Where does Mara Lind work, and what does she lead?"
NUM_GENERATED = 32
NUM_LOGITS = 300  # rows compared with transformers


class Setup:
    """One model in float32, and a store of four documents that are longer together than Gemma's window of 512
    tokens."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.file = name, gguf_file(name)
        self.engine = Engine.load(EngineConfig(model=str(self.file), dtype="float32", kv_dtype="exact"))
        for number, page in enumerate(pages()):
            (folder / f"{number}.md").write_text(page)
        self.store = ChunkStore.open(folder / "store", mode="write")
        self.engine.precompute(self.store, [str(folder)], PrecomputeOptions(), lambda event: None)
        chunks = sorted(self.store.chunks(), key=lambda m: (m.source, m.index), reverse=True)
        self.keys = [m.key for m in chunks]

    def question(self, blend: BlendParams) -> AskRequest:
        return AskRequest(QUESTION, self.keys, blend, SamplingParams(max_tokens=NUM_GENERATED, ignore_eos=True))

    def prefill(self, blend: BlendParams, *, num_logits: int = 8) -> Prefilled:
        request = resolve(self.engine.runtime, self.store, self.question(blend))
        done = prefill(
            self.engine.runtime,
            request,
            output_positions=lambda plan: torch.arange(plan.num_tokens - num_logits, plan.num_tokens),
        )
        done.sequence.release()
        return done


def pages() -> list[str]:
    """Four pages of some 200 tokens, with indentation, a table and markup in them."""
    facts = (
        "Mara Lind leads billing. She works in the Bergen office, on the third floor.",
        "The harbour of Bergen opens at six. Ferries to the islands leave every hour.",
        "| Item | Price |\n|---|---|\n| <b>Valve</b> | 14 kr |\n| Gasket | 3 kr |\n\n    indented = True",
        "Jonas keeps a parrot, which speaks three languages and knows the timetable.",
    )
    filler = "The house has four floors, and each of them has a kitchen where people meet at noon. "
    return [f"# Page {number}\n\n{fact}\n\n{filler * 9}\n" for number, fact in enumerate(facts)]


@pytest.fixture(scope="module", params=EACH_MODEL)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for name in ("GGUFReader", "get_tensor_name_map"):  # seconds each; the engine and transformers ask four times
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        setup = Setup(request.param, tmp_path_factory.mktemp("real"))
        yield setup
        setup.store.close()


def test_full_prefill_has_the_logits_of_transformers(real: Setup) -> None:
    done = real.prefill(BlendParams(mode="full"), num_logits=NUM_LOGITS)
    assert len(done.plan.token_ids) > 600  # beyond Gemma's window
    expected = transformers_logits(real.file, torch.tensor([done.plan.token_ids]))
    assert (done.result.logits - expected).abs().max() <= TOLERANCE


def transformers_logits(file: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return the last NUM_LOGITS rows of transformers' logits, [NUM_LOGITS, vocab_size]. ids: [1, num_tokens].

    A layer's weights are read when it is computed, and freed after it: in float32 all of them take 6 GiB at 1.5B.
    """
    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    with no_init_weights():  # memory that is not written to is not used
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    whole = gguf.GGUFReader(str(file))
    numbers = {name: field for name, field in whole.fields.items() if not name.startswith("tokenizer.")}

    def load(name: Callable[[str], bool]) -> None:
        part = SimpleNamespace(fields=numbers, tensors=[tensor for tensor in whole.tensors if name(tensor.name)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gguf, "GGUFReader", lambda path: part)
            state = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
        assert state
        assert not model.load_state_dict(state, strict=False, assign=True).unexpected_keys

    def free(layer: torch.nn.Module, *_: Any) -> None:
        layer.to("meta")

    load(lambda name: not name.startswith("blk."))
    model.tie_weights()
    for number, layer in enumerate(model.model.layers):
        prefix = f"blk.{number}."
        layer.register_forward_pre_hook(lambda *_, prefix=prefix: load(lambda name: name.startswith(prefix)))
        layer.register_forward_hook(free)
    with torch.no_grad():
        logits = model(ids, attention_mask=torch.ones_like(ids), logits_to_keep=NUM_LOGITS, use_cache=False).logits
    return cast(torch.Tensor, logits[0])


def test_the_prompt_is_what_transformers_renders(real: Setup) -> None:
    field = gguf.GGUFReader(str(real.file)).get_field("tokenizer.chat_template")
    if field is None:
        pytest.skip("a base model: the file has no chat template")
    tokenizer = real.engine.model.tokenizer
    template = split_template(tokenizer, Wording(prompt="{chunks}\n\n{question}"))
    chunk = f"{''.join(pages())}end"  # a word, or its last token and the line breaks behind it are one
    [expected], _ = render_jinja_template(
        conversations=[[{"role": "user", "content": f"{chunk}\n\n{QUESTION}"}]],
        chat_template=field.contents(),
        add_generation_prompt=True,
    )
    ids = [*template.prefix_ids, *tokenizer.encode_text(chunk), *template.suffix_ids(QUESTION)]
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert ids == tokenizer.encode_template(expected)


@pytest.mark.parametrize("selector", ["hkvd", "query"])
def test_recomputing_everything_is_a_full_prefill(real: Setup, selector: str) -> None:
    full = real.prefill(BlendParams(mode="full")).result.logits
    blended = real.prefill(BlendParams(ratio=1.0, selector=selector)).result.logits
    assert (blended - full).abs().max() <= TOLERANCE
    reused = real.prefill(BlendParams(mode="reuse")).result.logits
    assert (reused - full).abs().max() > 10 * TOLERANCE  # or the above would prove little


def test_models_check_finds_it_right(real: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "check", str(real.file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
