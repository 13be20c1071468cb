"""Errors that are answers: `llmq.cli.main` prints the message of one with an `exit_code`, and exits with it."""


class InputError(Exception):
    """Wrong usage or input: what was wrong, which value, what would work."""

    exit_code = 2


class FailedError(Exception):
    """The work was understood and did not succeed."""

    exit_code = 1
