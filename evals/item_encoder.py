"""Items as token ids: split as lm-eval's `hf` backend splits them, conversations as the server renders them."""

from llmq.evals.counts import HarnessCounts
from llmq.profiles.errors import InputError
from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.tokenizer import Tokenizer

TokenPair = tuple[list[int], list[int]]  # context, continuation


class ItemEncoder:
    """Remembers the ids of each conversation that it rendered: lm-eval hands back the text alone."""

    def __init__(self, tokenizer: Tokenizer, counts: HarnessCounts) -> None:
        """What is out of the ordinary about an item is added to `counts`."""
        self._tokenizer = tokenizer
        self._counts = counts
        self._chat_ids: dict[str, list[int]] = {}  # rendered conversation -> ids as the server would make them

    @property
    def eot_token_id(self) -> int:
        own = self._tokenizer.eos_token_id
        return min(self._tokenizer.eos_token_ids) if own is None else own

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context is conditioned on."""
        bos = self._tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def text(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """None: what the tokenizer adds by itself (never a second BOS)."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens is not False)

    def prompt(self, context: str) -> list[int]:
        """What an answer is generated from: never empty."""
        return self._chat_ids.get(context) or self.text(context) or [self.prefix_token_id]

    def conversation(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """The rendered text, without a system turn where the chat template refuses one. Raises InputError."""
        try:
            return self._render(messages, add_generation_prompt)
        except InvalidRequestError as error:
            others = [message for message in messages if message["role"] != "system"]
            if len(others) == len(messages):
                raise InputError(str(error)) from error
            self._counts.num_system_dropped += 1
            return self._render(others, add_generation_prompt)

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        text = self._tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)
        if not add_generation_prompt:
            return _cut_after(text, messages[-1]["content"])
        self._chat_ids[text] = self._tokenizer.encode_chat(messages)
        return text

    def item(self, context: str, continuation: str) -> TokenPair:
        if context:
            return self.pair(context, continuation)
        ids = self.text(continuation, add_special_tokens=False)
        if ids[:1] == [self.prefix_token_id]:
            return ids[:1], ids[1:]
        return [self.prefix_token_id], ids

    def pair(self, context: str, continuation: str) -> TokenPair:
        """Both encoded as one text and split where the context alone ends; apart where that leaves nothing to score."""
        chat_ids = self._chat_ids.get(context)
        add_special = chat_ids is None
        if chat_ids is not None and self.text(context, add_special_tokens=False) != chat_ids:
            # Message text holds a special token's name: as text the conversation would read otherwise than served.
            self._counts.num_encoded_apart += 1
            return chat_ids, self._tokenizer.encode_literally(continuation)
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        context_ids = self.text(context, add_special_tokens=add_special)
        whole_ids = self.text(context + continuation, add_special_tokens=add_special)
        continuation_ids = whole_ids[len(context_ids) :]
        if not context_ids or not continuation_ids:
            self._counts.num_encoded_apart += 1
            continuation_ids = self.text(continuation, add_special_tokens=False)
            return context_ids or [self.prefix_token_id], continuation_ids
        self._counts.num_unequal_joins += whole_ids[: len(context_ids)] != context_ids
        return context_ids, continuation_ids


def _cut_after(rendered: str, last_content: str) -> str:
    """The conversation open at the end of its last message, as transformers' `continue_final_message` leaves it."""
    begin = rendered.rindex(last_content.strip())
    with_trailing_space = begin + len(last_content.lstrip())
    if rendered[begin:with_trailing_space] == last_content.lstrip():
        return rendered[:with_trailing_space]
    return rendered[: begin + len(last_content.strip())]
