"""Answers constrained by a JSON schema or a regular expression, by llguidance."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.extras import install_hint
from cacheblend_cli.kv.pool import upload
from cacheblend_cli.model.loading import LoadedModel
from cacheblend_cli.types import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Grammar:
    """Progress of one answer in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = torch.zeros(-(-vocab_size // 32), dtype=torch.int32)

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_stopped())

    def allowed(self, logits: Tensor) -> Tensor:
        """Return fp32 logits [vocab_size] with -inf for tokens that may not come next."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.data_ptr(), self._mask.numel() * 4)
        places = torch.arange(32, dtype=torch.int32, device=logits.device)
        bits = (upload(self._mask, logits.device, torch.int32)[:, None] >> places) & 1
        allowed = bits.flatten()[: logits.shape[0]].bool()
        return logits.masked_fill(~allowed, float("-inf"))

    def take(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


def grammar_of(tokenizer: LLTokenizer, params: SamplingParams) -> Grammar:
    """Return the grammar of the answer's JSON schema or regular expression. Raises UsageError for an invalid one."""
    from llguidance import LLMatcher

    if params.json_schema is not None:
        try:
            json.loads(params.json_schema)
            grammar, name = LLMatcher.grammar_from_json_schema(params.json_schema), "JSON schema"
        except ValueError as error:
            raise UsageError(f"the JSON schema is not JSON: {error}", "see json-schema.org") from error
    else:
        assert params.regex is not None
        grammar, name = LLMatcher.grammar_from_regex(params.regex), "regular expression"
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        first = matcher.get_error().strip().splitlines()[0]
        raise UsageError(f"the {name} is not supported: {first}", "simplify it")
    return Grammar(matcher, tokenizer.vocab_size)


def form_tokenizer(model: LoadedModel) -> LLTokenizer:
    """Return the model's tokens in llguidance's form. Raises UsageError if it is not installed."""
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise UsageError(
            "answers with a grammar need llguidance, which is not installed", install_hint("grammar")
        ) from error
    return LLTokenizer(model.tokenizer.to_json(), n_vocab=model.spec.vocab_size, eos_token=sorted(model.eos_ids))
