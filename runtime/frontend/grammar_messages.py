"""What is said between `grammar_process` and the processes of `grammar_worker`."""

import msgspec


class Check(msgspec.Struct, frozen=True, tag=True):
    """Can what a caller wrote be followed? Answered with the grammar that it means. `param`: what errors call it."""

    source: str
    param: str


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Follow a grammar, of which these tokens have been written. Answered with a mask."""

    grammar: str
    token_ids: list[int]


class Advance(msgspec.Struct, frozen=True, tag=True):
    """These tokens came next. Answered with a mask."""

    token_ids: list[int]


class Answer(msgspec.Struct, frozen=True):
    """Exactly one of these is not empty."""

    grammar: str = ""
    mask: bytes = b""  # a bit a token of the vocabulary, the lowest first: what may come next
    error: str = ""


Question = Check | Begin | Advance
