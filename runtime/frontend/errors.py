"""InvalidRequestError: what a caller must change, in a form that the server turns into a 400."""


class InvalidRequestError(ValueError):
    """A request that cannot be served as it stands.

    `param` names the field at fault (None: no single one), `code` is a word for programs such as
    "context_length_exceeded"; the message says which value was wrong and what would work.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
