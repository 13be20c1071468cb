"""lm-eval's LM over our Engine: the same runtime, kernels and chat template that serve, with lm-eval's own tasks."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from llmq.evals.answer_log import AnswerLog, request_key
from llmq.evals.generation import Generation, generation_request
from llmq.evals.overlength import OnOverlength, Overlength
from llmq.evals.stepping import EngineLike, RequestStream
from llmq.profiles.errors import InputError
from llmq.profiles.progress import Progress, silent
from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.input_processor import InputProcessor
from llmq.runtime.frontend.output_processor import SequenceOutput
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams

TokenPair = tuple[list[int], list[int]]  # context, continuation


@dataclass
class HarnessCounts:
    """What happened to the items, so that nothing is silent."""

    num_likelihoods: int = 0
    num_generations: int = 0
    num_truncated: int = 0  # contexts cut from the left to fit the model
    num_left_out: int = 0  # requests of items that are longer than the model, where --on-overlength is skip
    num_encoded_apart: int = 0  # continuations encoded alone: joined to the context they left no token of their own
    num_unequal_joins: int = (
        0  # context and continuation share a token when encoded jointly: it is scored as lm-eval does
    )
    num_hit_cap: int = 0  # generations that ended at max_gen_toks
    num_empty: int = 0  # generations without text
    num_system_dropped: int = 0  # conversations whose system turn the chat template refuses

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


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
        self.prompt_token_ids: dict[tuple[str, str], list[int]] = {}  # (context, continuation or "") -> as computed
        self._answers = AnswerLog() if answers is None else answers
        self.first_token_ids: list[int] = []  # of the first prompt that was sent
        self._engine = engine
        self._tokenizer = tokenizer
        self._input = InputProcessor(tokenizer, engine.info)
        self.overlength = Overlength(on_overlength)
        self._progress = progress
        self._chat_ids: dict[str, list[int]] = {}  # rendered conversation -> ids as the server would make them

    @property
    def max_length(self) -> int:
        return self._engine.info.max_model_len - 1

    @property
    def eot_token_id(self) -> int:
        own = self._tokenizer.eos_token_id
        return min(self._tokenizer.eos_token_ids) if own is None else own

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context is conditioned on."""
        bos = self._tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        template = self._tokenizer.chat_template
        return f"{self._tokenizer.folder.name}-{template.sha256[:16] if template else 'no-template'}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        template = self._tokenizer.chat_template
        return template.source if chat_template and template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        try:
            return self._render(chat_history, add_generation_prompt)
        except InvalidRequestError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise InputError(str(error)) from error
            self.counts.num_system_dropped += 1
            return self._render(others, add_generation_prompt)

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        text = self._tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)
        if not add_generation_prompt:
            return _cut_after(text, messages[-1]["content"])
        self._chat_ids[text] = self._tokenizer.encode_chat(messages)
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """None: what the tokenizer adds by itself (never a second BOS)."""
        return self._tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        encoded = []
        for request in requests:
            context, continuation = request.args
            context_ids, continuation_ids = self._encode_item(context, continuation)
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

    def _encode_item(self, context: str, continuation: str) -> TokenPair:
        if context:
            return self._encode_pair(context, continuation)
        ids = self.tok_encode(continuation, add_special_tokens=False)
        if ids[:1] == [self.prefix_token_id]:
            return ids[:1], ids[1:]
        return [self.prefix_token_id], ids

    def _encode_pair(self, context: str, continuation: str) -> TokenPair:
        """Both encoded as one text and split where the context alone ends; apart where that leaves nothing to score."""
        chat_ids = self._chat_ids.get(context)
        add_special = chat_ids is None
        if chat_ids is not None and self.tok_encode(context, add_special_tokens=False) != chat_ids:
            # Message text holds a special token's name: as text the conversation would read otherwise than served.
            self.counts.num_encoded_apart += 1
            return chat_ids, self._tokenizer.encode_literally(continuation)
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        context_ids = self.tok_encode(context, add_special_tokens=add_special)
        whole_ids = self.tok_encode(context + continuation, add_special_tokens=add_special)
        continuation_ids = whole_ids[len(context_ids) :]
        if not context_ids or not continuation_ids:
            self.counts.num_encoded_apart += 1
            continuation_ids = self.tok_encode(continuation, add_special_tokens=False)
            return context_ids or [self.prefix_token_id], continuation_ids
        self.counts.num_unequal_joins += whole_ids[: len(context_ids)] != context_ids
        return context_ids, continuation_ids

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each token scored once, in windows of `max_length`."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
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
            for index in _leaders_first([tuple(context) for _, context, _ in requests]):
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
        prompt = self._chat_ids.get(context) or self.tok_encode(context) or [self.prefix_token_id]
        try:
            return generation_request(prompt, options, self._input, self.max_length)
        except InvalidRequestError as error:
            raise InputError(f"task {request.task_name}, item {request.doc_id}: {error}") from error

    def _request(self, index: int, ids: list[int], params: SamplingParams) -> EngineRequest:
        if not self.first_token_ids:
            self.first_token_ids = ids[:8]
        return EngineRequest(request_id=str(index), prompt_token_ids=ids, sampling_params=params)


def _leaders_first(contexts: list[tuple[int, ...]], group_size: int = 64) -> list[int]:
    """An order in which a context is computed by one request before the others that share it, so that they hit its
    blocks in the prefix cache: equal and similar contexts side by side, and in each group of contexts one request of
    each before the rest.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for index, context in enumerate(contexts):
        members.setdefault(context, []).append(index)
    groups = [members[context] for context in sorted(members)]
    order: list[int] = []
    for begin in range(0, len(groups), group_size):
        part = groups[begin : begin + group_size]
        order += [group[0] for group in part]
        order += [index for group in part for index in group[1:]]
    return order


def _cut_after(rendered: str, last_content: str) -> str:
    """The conversation open at the end of its last message, as transformers' `continue_final_message` leaves it."""
    begin = rendered.rindex(last_content.strip())
    with_trailing_space = begin + len(last_content.lstrip())
    if rendered[begin:with_trailing_space] == last_content.lstrip():
        return rendered[:with_trailing_space]
    return rendered[: begin + len(last_content.strip())]
