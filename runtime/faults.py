"""One request's fault is its own: what is raised in its part of a step becomes its error, and nobody else's."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOG = logging.getLogger(__name__)


class RequestFaultError(Exception):
    """What is wrong with one request, in words for whoever sent it."""


def describe(error: Exception) -> str:
    """For the request's answer; what is no known fault goes to the log too, with its traceback."""
    if isinstance(error, RequestFaultError):
        return str(error)
    _LOG.error("a request fails in the engine", exc_info=error)
    return f"{type(error).__name__}: {error}"


@contextmanager
def isolated(errors: dict[int, str], row: int) -> Iterator[None]:
    """An exception of the body becomes `errors[row]`."""
    try:
        yield
    except Exception as error:
        errors[row] = describe(error)
