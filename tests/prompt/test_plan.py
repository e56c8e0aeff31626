"""The prompt plan: segments tile the prompt, and what is called exact is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cacheblend_cli.prompt.plan import ChunkInput, PromptPlan, plan_prompt

IDS = st.lists(st.integers(0, 9), max_size=5).map(tuple)
CHUNKS = st.lists(
    st.builds(
        ChunkInput,
        key=st.binary(min_size=2, max_size=2),
        source=st.just("a.md"),
        token_ids=IDS.filter(bool),
        left_context_ids=IDS,
        cached=st.booleans(),
        same_regime=st.booleans(),
    ),
    max_size=5,
)
PROMPTS = st.tuples(IDS, CHUNKS, IDS.filter(bool), st.booleans(), st.booleans())


def planned(
    prompt: tuple[tuple[int, ...], list[ChunkInput], tuple[int, ...], bool, bool],
) -> tuple[PromptPlan, list[ChunkInput]]:
    prefix, chunks, suffix, prefix_cached, reuse = prompt
    return plan_prompt(prefix, chunks, suffix, prefix_key=b"p" if prefix_cached else None, reuse=reuse), chunks


@given(PROMPTS)
def test_segments_tile_the_prompt(
    prompt: tuple[tuple[int, ...], list[ChunkInput], tuple[int, ...], bool, bool],
) -> None:
    plan, chunks = planned(prompt)
    assert plan.segments[0].start == 0
    for before, after in zip(plan.segments, plan.segments[1:], strict=False):
        assert before.end == after.start
    assert plan.num_tokens == plan.segments[-1].end
    assert plan.token_ids == [*prompt[0], *(i for c in chunks for i in c.token_ids), *prompt[2]]
    assert plan.segments[-1].kind == "suffix"
    assert plan.segments[-1].status == "computed"
    assert [s.key for s in plan.chunks] == [c.key for c in chunks]


@given(PROMPTS)
def test_exact_spans_are_true(
    prompt: tuple[tuple[int, ...], list[ChunkInput], tuple[int, ...], bool, bool],
) -> None:
    """A chunk is exact only if it was collected after the same text, and the KV of that text is right too."""
    plan, chunks = planned(prompt)
    for number, (segment, chunk) in enumerate(zip(plan.chunks, chunks, strict=True)):
        if segment.status == "computed":
            assert not (prompt[4] and chunk.cached)
            continue
        before = [i for c in chunks[:number] for i in c.token_ids]
        right = all(s.status != "blended" for s in plan.chunks[:number])
        assert (segment.status == "exact") == (right and chunk.same_regime and tuple(before) == chunk.left_context_ids)


@given(PROMPTS)
def test_tokens_are_counted_once(
    prompt: tuple[tuple[int, ...], list[ChunkInput], tuple[int, ...], bool, bool],
) -> None:
    plan, _ = planned(prompt)
    exact_prefix = sum(len(s.token_ids) for s in plan.segments if s.kind == "prefix" and s.cached)
    assert plan.fresh_tokens + plan.cached_tokens + exact_prefix == plan.num_tokens
    assert plan.exact_tokens + plan.inexact_tokens == plan.cached_tokens
    if not prompt[4]:
        assert plan.fresh_tokens == plan.num_tokens
