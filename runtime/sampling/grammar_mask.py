"""GrammarMask: leaves a row only the tokens with which a request's grammar can go on."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from llguidance import LLMatcher

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.faults import RequestFaultError, isolated
from llmq.runtime.frontend.grammar import GrammarCompiler, panics_raise
from llmq.runtime.frontend.grammar_messages import Advance, Begin
from llmq.runtime.frontend.grammar_process import Follower, GrammarFaultError, GrammarProcesses

# The longest that a step waits for all grammars that callers wrote, together. Each is ended after half a second of
# computing; this is what is left where the machine is busy.
STEP_WAIT_S = 2.0


class Matcher(Protocol):
    """Follows one output. Both raise RequestFaultError where the grammar became too complex to follow."""

    def advance(self, token_ids: list[int]) -> None: ...

    def mask(self, deadline_s: float) -> bytes:
        """A bit a token, the lowest first: what may come next. `deadline_s` is of time.monotonic."""


class LocalMatcher:
    """In this process: for grammars that llmq makes, whose cost llguidance's limits bound."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._check()

    def advance(self, token_ids: list[int]) -> None:
        with panics_raise(RequestFaultError):
            self._matcher.consume_tokens(token_ids)
        self._check()

    def mask(self, deadline_s: float) -> bytes:
        with panics_raise(RequestFaultError):
            mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0]
            raise RequestFaultError(f"the grammar cannot be followed further: {reason}")


class IsolatedMatcher:
    """In a process of its own, which computes from `advance` on: for grammars that callers wrote."""

    def __init__(self, follower: Follower, grammar: str) -> None:
        self._follower = follower
        self._grammar: str | None = grammar  # until it is sent
        self._is_asked = False

    def advance(self, token_ids: list[int]) -> None:
        if self._is_asked and not token_ids:
            return  # the step was not finished and is tried again
        with _faults_of_requests():
            begins = self._grammar is not None
            self._follower.ask(Begin(self._grammar, token_ids) if begins else Advance(token_ids))
        self._grammar, self._is_asked = None, True

    def mask(self, deadline_s: float) -> bytes:
        self._is_asked = False
        with _faults_of_requests():
            return self._follower.answer(deadline_s).mask


@dataclass
class GrammarState:
    """Where a request's output stands in its grammar. A cache: a new one reads the output again, so a request that was
    preempted goes on as it would have."""

    matcher: Matcher
    num_consumed: int = 0


class GrammarMask:
    """`advance` for all rows of a step, then a call for each."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler], processes: GrammarProcesses) -> None:
        """`make_compiler` is called once, when the first grammar comes; `processes` follow those that callers wrote."""
        self._make_compiler = make_compiler
        self._compiler: GrammarCompiler | None = None
        self._processes = processes
        self._deadline_s = 0.0

    def advance(self, rows: Mapping[int, RunnerRequest], errors: dict[int, str]) -> None:
        """Tell grammars what was written since; what fails becomes its row's error."""
        for row, request in rows.items():
            with isolated(errors, row):
                if request.grammar_state is None:
                    request.grammar_state = GrammarState(self._matcher(request))
                state: GrammarState = request.grammar_state
                new = request.token_ids[request.num_prompt_tokens + state.num_consumed :]
                state.matcher.advance(new)
                state.num_consumed += len(new)
        self._deadline_s = time.monotonic() + STEP_WAIT_S

    def __call__(self, row: torch.Tensor, request: RunnerRequest) -> None:
        """Set all other tokens of a row (float32 [vocab_size], changed in place) to -inf.

        Raises RequestFaultError where the grammar became too complex to follow.
        """
        state: GrammarState = request.grammar_state
        bits = np.frombuffer(state.matcher.mask(self._deadline_s), dtype=np.uint8)
        allowed = np.zeros(len(row), dtype=bool)
        known = np.unpackbits(bits, bitorder="little")[: len(row)]
        allowed[: len(known)] = known
        row.masked_fill_(torch.from_numpy(~allowed).to(row.device), -torch.inf)

    def _matcher(self, request: RunnerRequest) -> Matcher:
        grammar = request.params.grammar
        if request.params.isolate_grammar:
            with _faults_of_requests():
                return IsolatedMatcher(self._processes.connect(), grammar)
        if self._compiler is None:
            self._compiler = self._make_compiler()
        with panics_raise(RequestFaultError):
            return LocalMatcher(self._compiler.matcher(grammar))


@contextmanager
def _faults_of_requests() -> Iterator[None]:
    try:
        yield
    except GrammarFaultError as error:
        raise RequestFaultError(f"the grammar cannot be followed further: {error}") from None
