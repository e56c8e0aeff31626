"""Prompt lookup against a search of every place; costs of steps, shares of right proposals, and the choice of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.features import speculation
from cacheblend_cli.engine.features.prompt_lookup import LEAST_MATCH, MOST_MATCH, MOST_PLACES, Match, PromptLookup
from cacheblend_cli.engine.features.speculation import MOST_ROWS, PRIOR, PRIOR_COUNT, Acceptance, Speculation, StepCosts

SMALL = st.lists(st.integers(0, 2), max_size=40)


def searched(ids: list[int], most: int) -> Match | None:
    """The longest match of the last tokens, the latest of several, by comparing every place."""
    best: Match | None = None
    for end in range(len(ids) - 1, LEAST_MATCH - 1, -1):
        length = 0
        while length < min(MOST_MATCH, end) and ids[end - 1 - length] == ids[-1 - length]:
            length += 1
        if length >= LEAST_MATCH and (best is None or length > best.num_tokens):
            best = Match(length, tuple((ids[end:] * (most + 1))[:most]))
    return best


@given(SMALL, st.lists(SMALL, max_size=6), st.integers(0, 6))
def test_the_match_is_that_of_a_search_of_every_place(prompt: list[int], parts: list[list[int]], most: int) -> None:
    lookup, answer = PromptLookup(prompt), list[int]()
    for part in parts:
        answer += part[:8]
        assert lookup.find(answer, most) == searched(prompt + answer, most)


@given(st.lists(st.integers(0, 1), min_size=3, max_size=60))
def test_every_token_of_an_answer_may_be_looked_up(ids: list[int]) -> None:
    """As in decoding: one further token a call, and the same result as of an index made anew."""
    lookup = PromptLookup(ids[:2])
    for end in range(3, len(ids) + 1):
        assert lookup.find(ids[2:end], 3) == PromptLookup(ids[:end]).find([], 3)


def test_short_prompts_have_no_match() -> None:
    for ids in ([], [1], [1, 1], [1, 2, 3, 4]):
        assert PromptLookup(ids).find([], 4) is None
    assert PromptLookup([1, 1, 1]).find([], 4) == Match(2, (1, 1, 1, 1)), "it goes round in a circle"
    assert PromptLookup([]).find([5, 6, 7, 5, 6], 2) == Match(2, (7, 5))


def test_old_places_of_a_frequent_pair_are_not_compared() -> None:
    """The number of compared places is bounded, so a step's time is too."""
    rare = [7, 8, 9, 1, 2, 50]
    filler = [token for i in range(MOST_PLACES) for token in (100 + i, 1, 2, 200 + i)]
    found = PromptLookup([*rare, *filler, 7, 8, 9, 1, 2]).find([], 1)
    assert found == Match(2, (200 + MOST_PLACES - 1,))
    assert PromptLookup([*rare, *filler[4:], 7, 8, 9, 1, 2]).find([], 1) == Match(5, (50,))


# costs


def test_costs_are_guessed_until_they_are_measured(tmp_path: Path) -> None:
    costs = StepCosts(tmp_path / "costs")
    assert not costs.known
    assert [costs(1), costs(3)] == pytest.approx([1.0, 1.4])
    costs.record(1, 0.1)
    assert costs.known
    for _ in range(100):
        costs.record(4, 0.2)
    assert costs(4) == pytest.approx(2.0, rel=0.05)
    assert costs(2) == pytest.approx(1.2), "of the nearest lower number of rows"
    assert costs(7) == pytest.approx(3.0, rel=0.05), "further rows cost what the measured ones do"
    for _ in range(100):
        costs.record(4, 0.05)
    assert costs(4) == pytest.approx(0.5, rel=0.05)
    assert costs(16) == costs(4), "no further row is cheaper than none"


def test_a_cost_is_never_more_than_as_many_steps(tmp_path: Path) -> None:
    costs = StepCosts(tmp_path / "costs")
    costs.record(1, 0.001)
    for rows in (2, 5, MOST_ROWS):
        costs.record(rows, 1000.0)
        assert costs(rows) <= rows
    known = [costs(rows) for rows in range(1, 40)]
    costs.record(MOST_ROWS + 1, 1e-9)
    assert [costs(rows) for rows in range(1, 40)] == known, "a larger batch is not noted"


def test_costs_are_kept_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "costs"
    costs = StepCosts(path)
    costs.save()
    assert not path.exists(), "nothing was measured"
    costs.record(1, 0.1)
    for _ in range(100):
        costs.record(3, 0.15)
    costs.save()
    again = StepCosts(path)
    assert again(3) == pytest.approx(costs(3), abs=0.01)
    assert not again.known
    path.unlink()
    again.save()
    assert not path.exists(), "nothing has changed"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a": 1}', b'{"2": "x"}', b'{"2": -1}', b'{"2": 0}', b'{"2": 3}', b'{"0": 1}', b'{"1": 1}',
        b'{"17": 2}', b'{"-3": 2}', b'{"2": NaN}', b'{"2": 1e999}', b'{"2.5": 2}', b'{"99999999999999999999999": 1}', b"[" * 100_000,
    ],
    ids=range(19),
)  # fmt: skip
def test_a_damaged_file_is_as_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "costs"
    path.write_bytes(content)
    costs, fresh = StepCosts(path), StepCosts(tmp_path / "none")
    assert [costs(n) for n in range(1, 20)] == [fresh(n) for n in range(1, 20)]


def test_a_file_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    costs = StepCosts(tmp_path / "file" / "costs")
    costs.record(1, 0.1)
    costs.record(2, 0.2)
    costs.save()


def test_shares_of_right_tokens_are_learnt() -> None:
    shares = Acceptance()
    assert [shares(n) for n in range(LEAST_MATCH, MOST_MATCH + 1)] == pytest.approx(PRIOR)
    assert shares(MOST_MATCH + 9) == shares(MOST_MATCH)
    for _ in range(300):
        shares.record(2, True)
        shares.record(MOST_MATCH + 3, False)
    assert shares(2) > 0.99
    assert shares(MOST_MATCH) < 0.01
    assert shares(3) == pytest.approx(PRIOR[1])
    once = Acceptance()
    once.record(2, True)
    assert once(2) == pytest.approx((0.97 * PRIOR_COUNT * PRIOR[0] + 1) / (0.97 * PRIOR_COUNT + 1))


# the choice


class Costs:
    """Costs of steps: 1 and `each` for each further row."""

    def __init__(self, each: float, known: bool = True) -> None:
        self.each, self.known = each, known

    def __call__(self, num_rows: int) -> float:
        return 1 + self.each * (num_rows - 1)


def chooser(monkeypatch: pytest.MonkeyPatch, num_tokens: int | None = None, **decoder: Any) -> Speculation:
    monkeypatch.setattr(speculation.user_cache, "recall", lambda path: "")
    part = SimpleNamespace(ranks=SimpleNamespace(size=1))
    rope = SimpleNamespace(regime=lambda seq_len: seq_len > 1000)
    known = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "multiplies_by_torch": False,
        "rope": rope,
        "part": part,
    }
    made = SimpleNamespace(kernels=SimpleNamespace(name="torch"), **known | decoder)
    runtime = SimpleNamespace(model=SimpleNamespace(fingerprint="f"), decoder=made, config=EngineConfig())
    return Speculation(runtime, num_tokens)  # type: ignore[arg-type]


class Answering(SimpleNamespace):
    """A sequence whose prompt repeats itself: its answer matches with MOST_MATCH tokens."""

    def __init__(self, prompt: list[int] | None = None, said: tuple[int, ...] = (), most: int = 100) -> None:
        prompt = [*range(30), *range(9)] if prompt is None else prompt
        out = SimpleNamespace(token_ids=list(said))
        super().__init__(
            output=SimpleNamespace(out=out, max_tokens=most), replay=0, kv_len=len(prompt) + len(said) - 1,
            state=SimpleNamespace(request=SimpleNamespace(plan=SimpleNamespace(token_ids=prompt))),
        )  # fmt: skip

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def sizes(chooser: Speculation, sequences: list[Answering]) -> list[int]:
    drafts = chooser.drafts(sequences)  # type: ignore[arg-type]
    assert all(drafts.values()), "no empty proposals"
    return [len(drafts.get(s, ())) for s in sequences]  # type: ignore[call-overload]


def test_free_rows_take_as_many_proposals_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = chooser(monkeypatch)
    choose.costs = Costs(0.0)  # type: ignore[assignment]
    assert sizes(choose, [Answering()]) == [MOST_ROWS - 1]
    assert choose.drafts([found := Answering()]) == {found: tuple(range(9, 9 + MOST_ROWS - 1))}  # type: ignore[list-item, comparison-overlap]
    shared = sizes(choose, [Answering() for _ in range(3)])
    assert sum(shared) == MOST_ROWS - 3
    assert min(shared) > 0


def test_nothing_is_proposed_where_it_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = chooser(monkeypatch)
    choose.costs = Costs(0.0, known=False)  # type: ignore[assignment]
    assert sizes(choose, [Answering()]) == [0], "no step was timed"
    choose.costs = Costs(1.0)  # type: ignore[assignment]
    assert sizes(choose, [Answering()]) == [0], "a row costs a step"
    choose.costs = Costs(0.0)  # type: ignore[assignment]
    assert sizes(choose, [Answering() for _ in range(MOST_ROWS)]) == [0] * MOST_ROWS, "a full batch"
    assert sizes(choose, [Answering() for _ in range(40)]) == [0] * 40
    assert sizes(choose, [Answering(list(range(40)))]) == [0], "no match"
    replaying = Answering()
    replaying.replay = 2
    assert sizes(choose, [replaying]) == [0]


def test_a_dearer_row_takes_fewer_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    choose, counts = chooser(monkeypatch), list[int]()
    for cost in (0.0, 0.3, 0.6, 0.9, 1.2):
        choose.costs = Costs(cost)  # type: ignore[assignment]
        counts += sizes(choose, [Answering()])
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[1] > counts[-1] == 0


@pytest.mark.parametrize(("each", "least"), [(0.2, 2.2), (0.5, 1.3), (1.0, 0.99), (1.5, 0.99)])
def test_an_answer_that_always_matches_is_not_slower(
    each: float, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though every step has proposals, so that none of one row is timed beside them. each: cost of a further row."""
    choose = chooser(monkeypatch)
    choose.costs, choose.accepted = StepCosts(tmp_path / "costs"), Acceptance(_right=[9.0] * 7)
    monkeypatch.setattr(choose, "_learn", lambda guess, ids: None)
    choose.costs.record(1, 0.1)
    speed_ups = list[float]()
    for _ in range(400):
        [count] = sizes(choose, [Answering()])
        choose.costs.record(1 + count, 0.1 * (1 + each * count))
        speed_ups.append(sum(0.9**depth for depth in range(count + 1)) / (1 + each * count))
    assert sum(speed_ups[200:]) / 200 > least


def test_the_better_match_gets_the_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = chooser(monkeypatch)
    choose.costs = Costs(0.5)  # type: ignore[assignment]
    weak = Answering([1, 2, 3, 4, 5, 1, 2])
    few = sizes(choose, [weak, Answering()])
    assert few[0] < few[1]


def test_wrong_proposals_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that never says what followed its match: soon nothing is proposed; of right ones more are."""
    for right in (False, True):
        choose, found = chooser(monkeypatch), list[int]()
        choose.costs = Costs(0.3)  # type: ignore[assignment]
        for _ in range(80):
            sequence = Answering([*range(30), *range(9)])
            found += sizes(choose, [sequence])
            sequence.output.out.token_ids += [9, 10, 11] if right else [300, 301]
            sequence.kv_len += 3 if right else 2
            choose.drafts([sequence])  # type: ignore[list-item]
        assert (found[-1] >= found[0] > 0) if right else (found[0] > found[-1] == 0)


def test_proposals_end_with_the_answer_and_before_other_frequencies(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (None, 6):
        choose = chooser(monkeypatch, number)
        choose.costs = Costs(0.0)  # type: ignore[assignment]
        assert sizes(choose, [Answering(said=(9,), most=4)]) == [2], "one token is drawn anyway"
        assert sizes(choose, [Answering(said=(9,), most=2)]) == [0]
        long = [*range(990), *range(8)]
        assert sizes(choose, [Answering(long)]) == [0]
        assert sizes(choose, [Answering([*range(1100), *range(8)])]) == [number or MOST_ROWS - 1]


def test_a_number_is_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = chooser(monkeypatch, 5)
    assert sizes(choose, [Answering(), Answering(list(range(40))), Answering()]) == [5, 0, 5]
    assert sizes(choose, [Answering() for _ in range(20)]) == [5] * 20


@pytest.mark.parametrize("number", [None, 5])
def test_where_torch_multiplies_a_step_has_the_rows_of_a_padded_one(
    number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows would round other sums."""
    choose = chooser(monkeypatch, number, multiplies_by_torch=True)
    choose.costs = Costs(0.0)  # type: ignore[assignment]
    for count in range(1, 7):
        assert count + sum(sizes(choose, [Answering() for _ in range(count)])) <= max(4, count)
    assert sizes(choose, [Answering()]) == [3]


def test_the_setting_says_who_speculates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation.user_cache, "recall", lambda path: "")

    def found(asked: int | str, device: str = "cpu", steady: bool = True, state: object = None) -> int | str | None:
        decoder = SimpleNamespace(device=torch.device(device), steady=steady, state_layout=state)
        config = EngineConfig(speculate=asked)
        runtime = SimpleNamespace(config=config, decoder=decoder, async_scheduling=device == "cuda")
        with monkeypatch.context() as patch:
            patch.setattr(
                Speculation, "__init__", lambda self, runtime, number=None: setattr(self, "_num_tokens", number)
            )
            one = Speculation.of(runtime)  # type: ignore[arg-type]
        return None if one is None else one._num_tokens or "auto"

    assert [found("auto"), found("off"), found(4)] == ["auto", None, 4]
    assert [found(asked, "cuda") for asked in ("auto", "off", 4)] == [None, None, 4]
    assert [found(asked, state=object()) for asked in ("auto", 4)] == [None, None]
    assert [found(asked, steady=False) for asked in ("auto", "off", 4)] == [None] * 3


def test_a_file_is_of_its_machine_and_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places = list[Path]()
    monkeypatch.setattr(speculation, "StepCosts", lambda path: places.append(path))
    chooser(monkeypatch)
    chooser(monkeypatch)
    chooser(monkeypatch, dtype=torch.bfloat16)
    monkeypatch.setattr(speculation, "cpu_name", lambda: "another")
    chooser(monkeypatch)
    assert places[0] == places[1]
    assert len(set(places)) == 3
