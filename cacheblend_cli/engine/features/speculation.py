"""Speculative decoding: tokens that prompt lookup proposes are computed in one step with the newest token, as further
rows. The answer takes them as far as they are the tokens that are drawn (Leviathan et al. 2023, with a draft that is
certain of one token), so that it is the same with and without proposals, to the token."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec
import torch

from cacheblend_cli import user_cache
from cacheblend_cli.engine.core.sequence import Drafts, Sequence
from cacheblend_cli.engine.features.prompt_lookup import LEAST_MATCH, MOST_MATCH, Match, PromptLookup
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.model.cpu import cpu_features, cpu_name
from cacheblend_cli.model.linear import STEADY_ROWS

FORMAT = 1
MOST_ROWS = 16
"""Maximum rows of a step with proposals."""
MIN_SPEEDUP = 1.03
"""Expected speed-up from which a step takes proposals."""
ROW_COST = 0.2
"""Cost of a further row until one is measured, as a share of a step."""
PRIOR = (0.4, 0.7, 0.8, 0.87, 0.87, 0.9, 0.93)
"""Chance that the token after a match of LEAST_MATCH to MOST_MATCH tokens is the next one, before any is seen: rounded
shares of three models' answers."""
DECAY, PRIOR_COUNT = 0.97, 10.0  # weight of earlier observations for each later one; observations that PRIOR stand for


class StepCosts:
    """Cost of a decode step by its number of rows, relative to a step of one row; measured while answers are decoded,
    and kept for later processes in a file of the user's cache. path: of this file."""

    def __init__(self, path: Path) -> None:
        self._path, self._kept = path, self._read(path)
        self._costs = {1: 1.0} | self._kept
        self._step_s = 0.0  # of one row lately, 0 before the first

    @staticmethod
    def _read(path: Path) -> dict[int, float]:
        try:
            costs = msgspec.json.decode(user_cache.recall(path), type=dict[int, float])
        except msgspec.MsgspecError:
            return {}
        valid = all(1 < rows <= MOST_ROWS and 0 < cost <= rows for rows, cost in costs.items())
        return costs if valid else {}

    def __call__(self, num_rows: int) -> float:
        known = max(n for n in self._costs if n <= num_rows)
        each = max(0.0, self._costs[known] - 1) / (known - 1) if known > 1 else ROW_COST
        return self._costs[known] + each * (num_rows - known)

    @property
    def known(self) -> bool:
        """Return whether a step was measured."""
        return self._step_s > 0

    def record(self, num_rows: int, seconds: float) -> None:
        """Take the time of a step."""
        if num_rows > MOST_ROWS:
            return
        cost, rows = self(num_rows), float(num_rows)
        if num_rows > 1 and self.known:
            found = min(max(seconds / self._step_s, 0.5), rows)  # bounded, because other programs disturb single steps
            self._costs[num_rows] = min(cost + 0.15 * (found - cost), rows)
        # a longer step of one row would explain a dear row as well, so that it is known from steps of one row alone
        if num_rows == 1 or not self.known:
            self._step_s += (0.4 if self.known else 1.0) * (seconds / cost - self._step_s)

    def save(self) -> None:
        """Write the file if the costs have changed."""
        costs = {rows: round(cost, 2) for rows, cost in self._costs.items() if rows > 1}
        if any(abs(cost - self._kept.get(rows, 0.0)) > 0.05 * cost for rows, cost in costs.items()):
            self._kept = costs
            user_cache.keep(self._path, json.dumps(costs))


@dataclass
class Acceptance:
    """Share of right tokens after matches of LEAST_MATCH to MOST_MATCH tokens, lately."""

    _right: list[float] = field(default_factory=lambda: [PRIOR_COUNT * chance for chance in PRIOR])
    _seen: list[float] = field(default_factory=lambda: [PRIOR_COUNT] * len(PRIOR))

    def __call__(self, num_tokens: int) -> float:
        """Return the share for matches of num_tokens; longer ones count as MOST_MATCH."""
        index = min(num_tokens, MOST_MATCH) - LEAST_MATCH
        return self._right[index] / self._seen[index]

    def record(self, num_tokens: int, right: bool) -> None:
        index = min(num_tokens, MOST_MATCH) - LEAST_MATCH
        self._right[index] = DECAY * self._right[index] + right
        self._seen[index] = DECAY * self._seen[index] + 1


@dataclass(eq=False)
class LastMatch:
    """The index of a sequence's tokens, and the match of its newest ones."""

    lookup: PromptLookup
    match: Match | None = None
    num_tokens: int = 0  # of the answer when it was looked up


class Speculation:
    """Chooses the proposals of each step: as many as make it faster, by the costs of steps and by how often such
    proposals were right, and so none beside a full batch.

    num_tokens: proposals of each sequence instead, as many as there are up to this number."""

    def __init__(self, runtime: Runtime, num_tokens: int | None = None) -> None:
        model, config, decoder = runtime.model, runtime.config, runtime.decoder
        machine = cpu_name(), *cpu_features(), str(decoder.device), torch.get_num_threads(), decoder.part.ranks.size
        how = str(decoder.dtype), config.weight_dtype, decoder.kernels.name
        identity = FORMAT, model.fingerprint, *how, *machine
        self.costs, self.accepted = StepCosts(user_cache.place("steps", *identity)), Acceptance()
        self._rope, self._num_tokens = decoder.rope, num_tokens
        most_rows = MOST_ROWS if num_tokens is None else sys.maxsize
        self._most_rows = STEADY_ROWS if decoder.multiplies_by_torch else most_rows
        self._last = WeakKeyDictionary[Sequence, LastMatch]()

    @classmethod
    def of(cls, runtime: Runtime) -> Speculation | None:
        """Return the speculation that the settings ask for, None for none. By default there is none on a GPU, which
        computes a step before the last token is known. A model whose rows depend on their number has none, since its
        answers would depend on the times of steps, nor has a hybrid, whose state after a wrong proposal cannot be taken
        back."""
        asked, decoder = runtime.config.speculate, runtime.decoder
        on_cpu = decoder.device.type == "cpu" and not runtime.async_scheduling
        possible = decoder.steady and decoder.state_layout is None
        if not possible or asked == "off" or not (on_cpu or isinstance(asked, int)):
            return None
        return cls(runtime, asked if isinstance(asked, int) else None)

    def drafts(self, sequences: Several[Sequence]) -> Drafts:
        """Return the proposals of a step that decodes these sequences."""
        if len(sequences) >= self._most_rows:
            return {}
        matches = {s: match for s in sequences if (match := self._match(s)) is not None and match.followers}
        if self._num_tokens is not None:
            room = (self._most_rows - len(sequences)) // max(1, len(matches))
            return {s: match.followers[:room] for s, match in matches.items() if room}
        if not matches or not self.costs.known:
            return {}
        offers = list[tuple[float, Sequence]]()
        for sequence, match in matches.items():
            chance = 1.0
            for depth in range(len(match.followers)):
                chance *= self.accepted(match.num_tokens + depth)
                offers.append((chance, sequence))
        offers.sort(key=lambda offer: -offer[0])
        expected = plain = float(len(sequences))
        best, count = MIN_SPEEDUP * plain / self.costs(len(sequences)), 0
        for index, (chance, _) in enumerate(offers[: self._most_rows - len(sequences)], start=1):
            expected += chance
            if (rate := expected / self.costs(len(sequences) + index)) > best:
                best, count = rate, index
        taken = [sequence for _, sequence in offers[:count]]
        return {s: matches[s].followers[: taken.count(s)] for s in dict.fromkeys(taken)}

    def record(self, num_rows: int, seconds: float) -> None:
        self.costs.record(num_rows, seconds)

    def close(self) -> None:
        self.costs.save()

    def _match(self, sequence: Sequence) -> Match | None:
        """Return the match of a sequence's last tokens, after learning from the one before. None in a replay."""
        output = sequence.output
        assert output is not None
        if sequence.replay:
            return None
        last = self._last.get(sequence)
        if last is None:
            last = self._last[sequence] = LastMatch(PromptLookup(sequence.state.request.plan.token_ids))
        ids = output.out.token_ids
        self._learn(last, ids)
        most = max(0, min(self._num_tokens or MOST_ROWS - 1, output.max_tokens - len(ids) - 1))
        if self._rope.regime(sequence.kv_len + 1 + most) != self._rope.regime(sequence.kv_len + 1):
            most = 0
        last.match, last.num_tokens = last.lookup.find(ids, most), len(ids)
        return last.match

    def _learn(self, last: LastMatch, ids: list[int]) -> None:
        if last.match is None:
            return
        for depth, (token_id, drawn) in enumerate(zip(last.match.followers, ids[last.num_tokens :], strict=False)):
            self.accepted.record(last.match.num_tokens + depth, token_id == drawn)
            if token_id != drawn:
                break
