"""GrammarMask: leaves a row only the tokens with which a request's grammar can go on."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLMatcher

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.faults import RequestFaultError
from llmq.runtime.frontend.grammar import GrammarCompiler, panics_raise


@dataclass
class GrammarState:
    """Where a request's output stands in its grammar. A cache: a new one reads the output again, so a request that was
    preempted goes on as it would have."""

    matcher: LLMatcher
    num_consumed: int = 0


class GrammarMask:
    def __init__(self, make_compiler: Callable[[], GrammarCompiler]) -> None:
        """`make_compiler` is called once, when the first grammar comes."""
        self._make_compiler = make_compiler
        self._compiler: GrammarCompiler | None = None

    def __call__(self, row: torch.Tensor, request: RunnerRequest) -> None:
        """Set all other tokens of a row (float32 [vocab_size], changed in place) to -inf.

        Raises RequestFaultError where the grammar became too complex to follow.
        """
        with panics_raise(RequestFaultError):
            state = self._advance(request)
            bits = np.frombuffer(state.matcher.compute_bitmask(), dtype=np.uint8)
            _check(state.matcher)
        allowed = np.zeros(len(row), dtype=bool)
        known = np.unpackbits(bits, bitorder="little")[: len(row)]
        allowed[: len(known)] = known
        row.masked_fill_(torch.from_numpy(~allowed).to(row.device), -torch.inf)

    def _advance(self, request: RunnerRequest) -> GrammarState:
        if request.grammar_state is None:
            if self._compiler is None:
                self._compiler = self._make_compiler()
            request.grammar_state = GrammarState(self._compiler.matcher(request.params.grammar))
        state: GrammarState = request.grammar_state
        _check(state.matcher)
        new = request.token_ids[request.num_prompt_tokens + state.num_consumed :]
        state.matcher.consume_tokens(new)
        state.num_consumed += len(new)
        _check(state.matcher)
        return state


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise RequestFaultError(f"the grammar cannot be followed further: {matcher.get_error().splitlines()[0]}")
