"""lm-eval's LM over our Engine: the same runtime, kernels and chat template that serve, with lm-eval's own tasks."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from llmq.evals.answer_log import AnswerLog, request_key
from llmq.evals.counts import HarnessCounts
from llmq.evals.generation import Generation, generation_request
from llmq.evals.item_encoder import ItemEncoder
from llmq.evals.overlength import OnOverlength, Overlength
from llmq.evals.request_order import leaders_first
from llmq.evals.stepping import EngineLike, RequestStream
from llmq.profiles.errors import InputError
from llmq.profiles.progress import Progress, silent
from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.input_processor import InputProcessor
from llmq.runtime.frontend.output_processor import SequenceOutput
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams


class EngineLM(TemplateLM):
    """Scores and generates with an Engine in this process: all requests in flight together, prefixes shared.

    Token ids, windows and truncation are those of lm-eval's `hf` backend with `max_length` = the engine's
    `max_model_len` - 1 (that backend never feeds the last token of a scored sequence; an engine's request holds it).
    """

    def __init__(
        self,
        engine: EngineLike,
        tokenizer: Tokenizer,
        progress: Progress = silent,
        answers: AnswerLog | None = None,
        on_overlength: OnOverlength = OnOverlength.TRUNCATE,
    ):
        """answers: of an earlier run of the same, which are not computed again; new ones are added to it."""
        super().__init__()
        self.counts = HarnessCounts()
        self.encoder = ItemEncoder(tokenizer, self.counts)
        self.prompt_token_ids: dict[tuple[str, str], list[int]] = {}  # (context, continuation or "") -> as computed
        self._answers = AnswerLog() if answers is None else answers
        self.first_token_ids: list[int] = []  # of the first prompt that was sent
        self._engine = engine
        self._tokenizer = tokenizer
        self._input = InputProcessor(tokenizer, engine.info)
        self.overlength = Overlength(on_overlength)
        self._progress = progress

    @property
    def max_length(self) -> int:
        return self._engine.info.max_model_len - 1

    @property
    def eot_token_id(self) -> int:
        return self.encoder.eot_token_id

    @property
    def prefix_token_id(self) -> int:
        return self.encoder.prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        template = self._tokenizer.chat_template
        return f"{self._tokenizer.folder.name}-{template.sha256[:16] if template else 'no-template'}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        template = self._tokenizer.chat_template
        return template.source if chat_template and template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.encoder.conversation(chat_history, add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.encoder.text(string, add_special_tokens)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        encoded = []
        for request in requests:
            context, continuation = request.args
            context_ids, continuation_ids = self.encoder.item(context, continuation)
            if not continuation_ids:
                raise InputError(
                    f"task {request.task_name}, item {request.doc_id}: nothing to score in {request.args!r}"
                )
            encoded.append(((context, continuation), context_ids, continuation_ids))
        longest = self._engine.info.max_model_len
        lengths = {index: len(context) + len(rest) for index, (_, context, rest) in enumerate(encoded)}
        too_long = {index: length for index, length in lengths.items() if length > longest}
        left_out = self.overlength.left_out(requests, too_long, longest)
        self.counts.num_left_out += len(left_out)
        scores = iter(self._loglikelihood_tokens([one for i, one in enumerate(encoded) if i not in left_out]))
        return [(math.nan, False) if index in left_out else next(scores) for index in range(len(encoded))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each token scored once, in windows of `max_length`."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.encoder.text(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for pair in map(make_disjoint_window, rolling):
                windows.append((None, *pair))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str] | None, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """(summed log probability of the continuation, whether greedy decoding would write it) for each."""
        results: list[tuple[float, bool] | None] = [None] * len(requests)
        keys: dict[int, str] = {}
        done = -self._answers.num_reused

        def unanswered() -> Iterator[EngineRequest]:
            for index in leaders_first([tuple(context) for _, context, _ in requests]):
                texts, context, continuation = requests[index]
                request = self._scoring_request(index, context, continuation)
                if texts is not None:
                    self.prompt_token_ids[texts] = request.prompt_token_ids
                start = request.sampling_params.prompt_logprobs_start
                keys[index] = request_key("likelihood", request.prompt_token_ids, start)
                if (known := self._answers.find(keys[index])) is None:
                    yield request
                else:
                    results[index] = tuple(known)

        for output in RequestStream(self._engine, unanswered()):
            if output.prompt_logprobs is None:
                continue
            entries = output.prompt_logprobs
            answer = (math.fsum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries))
            index = int(output.request_id)
            results[index] = answer
            self._answers.add(keys[index], answer)
            if (texts := requests[index][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
            done += 1
            self._progress("likelihoods", done + self._answers.num_reused, len(requests), unit="requests")
        if None in results:
            raise RuntimeError(f"the engine left {results.count(None)} items of {len(requests)} without a score")
        self.counts.num_likelihoods += len(results)
        return [result for result in results if result is not None]

    def _scoring_request(self, index: int, context: list[int], continuation: list[int]) -> EngineRequest:
        longest = self._engine.info.max_model_len
        if len(continuation) >= longest:
            raise InputError(
                f"a continuation of {len(continuation)} tokens and a token of context do not fit this model's {longest}"
            )
        ids = context + continuation
        self.counts.num_truncated += len(ids) > longest
        ids = ids[-longest:]
        start = len(ids) - len(continuation)
        params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start)
        return self._request(index, ids, params)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Each request under its own options. The text ends before its first stop string."""
        generations = [self._generation(request) for request in requests]
        left_out = self._left_out_generations(requests, generations)
        num_asked = len(requests) - len(left_out)
        answers: list[dict[str, Any] | None] = [None] * len(requests)
        sequences: dict[int, SequenceOutput] = {}
        keys: dict[int, str] = {}
        done = -self._answers.num_reused

        def unanswered() -> Iterator[EngineRequest]:
            for index, (request, generation) in enumerate(zip(requests, generations, strict=True)):
                if index in left_out:
                    continue
                self.prompt_token_ids[request.args[0], ""] = generation.prompt_token_ids
                options = msgspec.to_builtins(generation.params, builtin_types=(frozenset,))
                keys[index] = request_key("generation", generation.prompt_token_ids, options, generation.stop)
                answers[index] = self._answers.find(keys[index])
                if answers[index] is None:
                    sequences[index] = SequenceOutput(str(index), self._tokenizer, stop=generation.stop)
                    yield self._request(index, generation.prompt_token_ids, generation.params)

        stream = RequestStream(self._engine, unanswered())
        for output in stream:
            index = int(output.request_id)
            delta = sequences[index].process(output)
            if delta.finish_reason is None:
                continue
            if output.finish_reason is None:
                stream.abort(output.request_id)
            answers[index] = {"text": sequences.pop(index).text, "finish_reason": delta.finish_reason}
            self._answers.add(keys[index], answers[index])
            self.cache_hook.add_partial("generate_until", requests[index].args, answers[index]["text"])
            done += 1
            self._progress("generations", done + self._answers.num_reused, num_asked, unit="requests")
        generated = [answer for answer in answers if answer is not None]
        self.counts.num_generations += len(generated)
        self.counts.num_hit_cap += sum(answer["finish_reason"] == "length" for answer in generated)
        self.counts.num_empty += sum(not answer["text"].strip() for answer in generated)
        return ["" if answer is None else answer["text"] for answer in answers]

    def _left_out_generations(self, requests: list[Instance], generations: list[Generation]) -> set[int]:
        cut = {index: one for index, one in enumerate(generations) if one.num_cut}
        too_long = {
            index: len(one.prompt_token_ids) + one.num_cut + one.params.max_tokens for index, one in cut.items()
        }
        left_out = self.overlength.left_out(requests, too_long, self.max_length)
        self.counts.num_left_out += len(left_out)
        self.counts.num_truncated += len(cut.keys() - left_out)
        return left_out

    def _generation(self, request: Instance) -> Generation:
        context, options = request.args
        try:
            return generation_request(self.encoder.prompt(context), options, self._input, self.max_length)
        except InvalidRequestError as error:
            raise InputError(f"task {request.task_name}, item {request.doc_id}: {error}") from error

    def _request(self, index: int, ids: list[int], params: SamplingParams) -> EngineRequest:
        if not self.first_token_ids:
            self.first_token_ids = ids[:8]
        return EngineRequest(request_id=str(index), prompt_token_ids=ids, sampling_params=params)
