"""Decoding: graphs and steps ahead give what the plain loop gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from callbacks import pieces_to
from checkpoints import write_checkpoint
from decoding import decode_one_token
from plain_loop import generate

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.core.sequence_output import Generation
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.decode import DecodeRunner, EagerRunner, GraphRunner, bucket, make_runner
from cacheblend_cli.errors import DeviceError
from cacheblend_cli.kv.forward import forward
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.kv.rows import rows_of
from cacheblend_cli.types import SamplingParams

PROMPT = list(range(5, 42))


@pytest.fixture(scope="module", params=["llama-gqa", "mistral-window", "llama3-rope"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("decode") / "model"
    write_checkpoint(path, request.param)
    return Engine.load(EngineConfig(model=str(path)))


class Replays:
    """A capture that runs the function itself, once before as a capture does; counts what is replayed."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        function()

        def replay() -> None:
            self.replayed += 1
            function()

        return replay


def pool_of(engine: Engine, num_blocks: int = 40) -> KVPool:
    return KVPool(engine.model.spec, num_blocks, 8, torch.float32, torch.device("cpu"))


@torch.inference_mode()
def prefilled(
    engine: Engine, pool: KVPool, ids: list[int], scattered: bool = False
) -> tuple[PagedSequence, torch.Tensor]:
    sequence = pool.new_sequence(len(ids) + 30)
    if scattered:
        sequence = PagedSequence(pool, sequence.blocks[::-1])
    rows = rows_of(engine.model.decoder, sequence, torch.arange(len(ids)), len(ids), len(ids))
    logits = forward(engine.model.decoder, rows, torch.tensor(ids))
    assert logits is not None
    return sequence, logits[-1]


def run(
    engine: Engine,
    pool: KVPool,
    params: SamplingParams,
    runner: DecodeRunner | None,
    ahead: bool,
    eos: set[int] | None = None,
) -> tuple[Generation, str]:
    sequence, logits = prefilled(engine, pool, PROMPT)
    shown: list[str] = []
    runtime = Runtime(replace(engine.model, eos_ids=frozenset(eos or ())), engine.config)
    found = generate(runtime, sequence, len(PROMPT), logits, params, pieces_to(shown.append), runner=runner)
    sequence.release()
    pool.allocator.check_integrity()
    return found, "".join(shown)


def facts(found: Generation) -> Any:
    return found.token_ids, found.text, found.finish_reason, found.logprobs


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=20, temperature=1.3, top_p=0.9, seed=3, logprobs=2),
        SamplingParams(max_tokens=1),
    ],
)
def test_every_runner_says_the_same(engine: Engine, params: SamplingParams) -> None:
    pool = pool_of(engine)
    plain, shown = run(engine, pool, params, None, False)
    assert len(plain.token_ids) == params.max_tokens
    assert shown == plain.text
    replays = Replays()
    graphs = GraphRunner(engine.model.decoder, pool, replays)
    for runner in (EagerRunner(engine.model.decoder), graphs, graphs):
        for ahead in (False, True):
            assert facts(run(engine, pool, params, runner, ahead)[0]) == facts(plain)
    assert replays.captured == (1 if params.max_tokens > 1 else 0)  # kept from question to question
    assert replays.replayed == 4 * (params.max_tokens - 1)


def test_no_memory_for_a_graph_names_the_flag(engine: Engine) -> None:
    def full(function: Callable[[], None]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    pool = pool_of(engine)
    with pytest.raises(DeviceError, match="1 rows") as caught:
        run(engine, pool, SamplingParams(max_tokens=4), GraphRunner(engine.model.decoder, pool, full), False)
    assert "--eager" in str(caught.value.hint)


def test_steps_ahead_end_where_the_plain_loop_ends(engine: Engine) -> None:
    """EOS at every place of the answer, and stop strings cut anywhere out of it."""
    pool = pool_of(engine)
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=11)
    whole, _ = run(engine, pool, params, None, False)
    for eos in set(whole.token_ids):
        ours, theirs = (run(engine, pool, params, None, ahead, {eos})[0] for ahead in (True, False))
        assert facts(ours) == facts(theirs)
        assert ours.finish_reason == "stop"
        assert ours.token_ids == whole.token_ids[: whole.token_ids.index(eos) + 1]
    for start in range(len(whole.text)):
        stop = (whole.text[start : start + 2],)
        stopped = SamplingParams(max_tokens=8, temperature=1.5, seed=11, stop=stop)
        ours, theirs = (run(engine, pool, stopped, None, ahead)[0] for ahead in (True, False))
        assert facts(ours) == facts(theirs)
        assert ours.text == whole.text[: whole.text.find(stop[0])]


def test_a_batch_in_a_bucket_is_each_sequence_alone(engine: Engine) -> None:
    """Three sequences in a bucket of four, of different lengths, one in scattered blocks, over a block's end."""
    pool, decoder = pool_of(engine), engine.model.decoder
    prompts = [PROMPT, list(range(50, 57)), [9, 8, 7]]
    alone = []
    for prompt in prompts:
        sequence, logits = prefilled(engine, pool, prompt)
        token, steps = int(logits.argmax()), []
        with torch.inference_mode():
            for i in range(12):
                steps.append(decode_one_token(decoder, pool, sequence, token, len(prompt) + i))
                token = int(steps[-1].argmax())
        alone.append(torch.stack(steps))
        sequence.release()
    runner = GraphRunner(decoder, pool, Replays())
    held = [prefilled(engine, pool, p, scattered=i == 0) for i, p in enumerate(prompts)]
    tokens = torch.stack([logits.argmax() for _, logits in held])
    runner.begin([s for s, _ in held], [len(p) for p in prompts], 12)
    for i in range(12):
        logits = runner.step(tokens)
        assert logits.shape[0] == 3
        assert (logits - torch.stack([a[i] for a in alone])).abs().max() < 1e-4
        tokens = logits.argmax(-1)
    for sequence, _ in held:
        sequence.release()
    assert pool.allocator.num_used == 1  # the spare block
    pool.allocator.check_integrity()


def test_a_graph_writes_nothing_but_its_sequences_next_token(engine: Engine) -> None:
    """Capturing, and the rows that only fill a bucket, touch the spare block alone."""
    pool, decoder = pool_of(engine), engine.model.decoder
    for cache in pool.tensors:
        cache.fill_(7.0)
    runner = GraphRunner(decoder, pool, Replays())
    sequences = [pool.new_sequence(24) for _ in range(3)]
    runner.begin(sequences, [9, 16, 0], 4)
    runner.step(torch.tensor([5, 6, 7]))
    written = {s.blocks[p // 8] * 8 + p % 8 for s, p in zip(sequences, (9, 16, 0), strict=True)}
    [spare] = set(range(40)) - set(pool.allocator._free) - {b for s in sequences for b in s.blocks}
    for cache in pool.tensors:
        changed = (cache.view(40 * 8, -1) != 7.0).any(-1).nonzero().flatten().tolist()
        assert set(changed) == written | {spare * 8}


def test_buckets() -> None:
    assert [bucket(n, 1) for n in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 8, 16]
    assert [bucket(n, 1024) for n in (1, 1024, 1025)] == [1024, 1024, 2048]


def test_the_cpu_decodes_eagerly(engine: Engine) -> None:
    assert isinstance(make_runner(engine.model.decoder, pool_of(engine)), EagerRunner)
