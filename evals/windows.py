"""Where a long text is cut into windows, and which tokens of each window are scored."""

from dataclasses import dataclass

from llmq.profiles.errors import InputError


@dataclass(frozen=True)
class Window:
    """Tokens `[begin, end)` of the text go through the model together; those from `first_scored` on are scored."""

    begin: int
    first_scored: int
    end: int

    @property
    def num_scored(self) -> int:
        return self.end - self.first_scored


@dataclass(frozen=True)
class WindowPlan:
    """Windows that score each token at most once, in order.

    `prefix` (a BOS or nothing) stands before the text in every window and counts towards `window`, so that no window
    is longer than `window` tokens. The first text token of the first window, and with stride = window of every window,
    has no text before it and is not scored: `num_unscored` counts them.
    """

    windows: tuple[Window, ...]
    prefix: tuple[int, ...]
    window: int
    stride: int
    num_tokens: int

    @property
    def num_scored(self) -> int:
        return sum(window.num_scored for window in self.windows)

    @property
    def num_unscored(self) -> int:
        return self.num_tokens - self.num_scored

    def prompt(self, index: int, token_ids: list[int]) -> list[int]:
        window = self.windows[index]
        return [*self.prefix, *token_ids[window.begin : window.end]]

    def prompt_start(self, index: int) -> int:
        """Position in `prompt(index)` of the first scored token."""
        window = self.windows[index]
        return len(self.prefix) + window.first_scored - window.begin


def plan_windows(
    num_tokens: int,
    window: int,
    stride: int | None = None,
    prefix: tuple[int, ...] = (),
    max_windows: int | None = None,
) -> WindowPlan:
    """Windows of `window` tokens, each beginning `stride` after the one before (None: side by side).

    With stride < window each window after the first scores only what the one before it had not reached, so that every
    token but the very first is scored once, with at least `window - stride` tokens before it. `max_windows` keeps the
    first ones, and `num_tokens` of the plan is then what they cover. Raises InputError on a window or stride that
    cannot score.
    """
    text_window = window - len(prefix)
    stride = text_window if stride is None else stride
    if text_window < 2:
        raise InputError(f"a window of {window} tokens scores nothing: at least {2 + len(prefix)} are needed")
    if not 1 <= stride <= text_window:
        beside = f" ({len(prefix)} of the window is the beginning-of-text token)" if prefix else ""
        raise InputError(f"stride {stride} is outside 1..{text_window}{beside}: a larger one would skip tokens")
    if num_tokens < 2:
        raise InputError(f"the text has {num_tokens} token(s): at least 2 are needed to score one")
    windows: list[Window] = []
    covered = 0
    for begin in range(0, num_tokens, stride):
        end = min(begin + text_window, num_tokens)
        first_scored = max(covered, begin + 1)
        covered = end
        if first_scored < end:
            windows.append(Window(begin, first_scored, end))
        if end == num_tokens or len(windows) == max_windows:
            break
    return WindowPlan(tuple(windows), prefix, window, stride, covered)
