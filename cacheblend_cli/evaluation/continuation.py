"""Decoding behind one prefilled prompt, outside of the engine: for measures that compare KV under teacher forcing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cacheblend_cli.engine.core.measured_prefill import Prefilled
from cacheblend_cli.engine.core.sequence_output import SequenceOutput
from cacheblend_cli.engine.events import OnEvent, ignore
from cacheblend_cli.engine.generation import Generation
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.decode import DecodeRunner
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.types import SamplingParams


@dataclass(frozen=True)
class Continuation:
    """A sequence that holds the KV of kv_len tokens, and the logits after the last one, fp32 [vocab_size]. prompt_ids:
    its tokens, for a repetition penalty."""

    sequence: PagedSequence
    kv_len: int
    logits: Tensor
    prompt_ids: Sequence[int] = ()

    @classmethod
    def of(cls, done: Prefilled) -> Continuation:
        """Return the continuation of a prompt."""
        return cls(done.sequence, done.plan.num_tokens, done.logits, done.plan.token_ids)


def generate(
    runtime: Runtime,
    begin: Continuation,
    params: SamplingParams,
    on_event: OnEvent = ignore,
    runner: DecodeRunner | None = None,
) -> Generation:
    """Decode until EOS, a stop string or max_tokens, one row a step."""
    output, runner = (
        SequenceOutput(runtime, params, begin.prompt_ids, on_event),
        runner or runtime.decode_runner(begin.sequence.pool),
    )
    draw = output.draw(begin.logits)
    if output.append(draw):
        runner.begin([begin.sequence], [begin.kv_len], output.max_tokens - 1)
        while output.append(draw := output.draw(runner.step(draw.token)[0])):
            pass
    return output.end()
