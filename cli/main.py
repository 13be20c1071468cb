"""The entry point of the `llmq` command. It imports little itself: an interrupt while Python imports is one too."""

import contextlib
import errno
import os
import signal
import sys

# What no program can help, wherever it meets it: a full disk, a closed pipe.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE, errno.EIO)


def main() -> None:
    """Entry point. An exception with an `exit_code` is an answer: its message goes to stderr, without a traceback."""
    # Until a verb is at work there is nothing to unwind, and the traceback of an import tells nobody anything.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from llmq.cli.verbs import app

    # OpenMP's threads spin while they wait for each other: on a machine with anything else to do that costs five times
    # the work itself. Read when torch loads, so it is set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Unwinds what is under way, so that no partial folder and no server is left; serve drains instead.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        exit_code, said = getattr(error, "exit_code", None), str(error)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            from llmq.cli.console import forget_stdout

            forget_stdout()
            exit_code, said = 1, error.strerror + (f": {error.filename}" if error.filename else "")
        if not isinstance(exit_code, int):
            raise
        with contextlib.suppress(OSError):
            print(f"llmq: {said}", file=sys.stderr)
        sys.exit(exit_code)
