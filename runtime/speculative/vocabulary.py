"""Whether two tokenizers mean the same by a token id."""

from pathlib import Path

from llmq.profiles.errors import InputError
from llmq.runtime.frontend.tokenizer import Tokenizer


def check_vocabulary(model: Path, drafter: Path) -> None:
    """Raises InputError where a token of the model is another one of the drafter, or none: a guess is a token id. Ids
    that only pad either vocabulary, and words that only the drafter has, do no harm."""
    known, guessed = (Tokenizer.from_folder(folder).words for folder in (model, drafter))
    for token_id, word in sorted(known.items()):
        if (other := guessed.get(token_id)) != word:
            what = "it has no such token" if other is None else f"there it is {other!r}"
            raise InputError(
                f"--draft-model {drafter}: its vocabulary is another one: token {token_id} is {word!r} here, {what}"
            )
