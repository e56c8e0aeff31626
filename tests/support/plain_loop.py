"""The plainest answer loop: one sequence, a token a step, without an engine core."""

from __future__ import annotations

from torch import Tensor

from cacheblend_cli.engine.core.sequence_output import Generation, SequenceOutput
from cacheblend_cli.engine.events import OnEvent, ignore
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.decode import DecodeRunner, EagerRunner
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.types import SamplingParams


def generate(
    runtime: Runtime,
    sequence: PagedSequence,
    kv_len: int,
    logits: Tensor,
    params: SamplingParams,
    on_event: OnEvent = ignore,
    runner: DecodeRunner | None = None,
) -> Generation:
    """Decode behind the KV of kv_len tokens. logits: after the last one, fp32 [vocab_size]."""
    output, runner = (
        SequenceOutput(runtime, params, (), on_event),
        runner or EagerRunner(runtime.decoder),
    )
    draw = output.draw(logits)
    if output.append(draw):
        runner.begin([sequence], [kv_len], output.max_tokens - 1)
        while output.append(draw := output.draw(runner.step(draw.token)[0])):
            pass
    return output.end()
