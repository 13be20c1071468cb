"""TimeAccount: what speculation has saved and spent, so that it never loses more than a little."""

# Of a step that guesses nothing: what watching texts may cost without being booked, and what wrong guesses may in the
# long run.
WATCHED, SHARE = 0.02, 0.01
# Such steps: what may be lost at first, and of gains later.
FIRST_STEPS, MOST_STEPS = 16, 64


class TimeAccount:
    """Every step adds SHARE of what it takes without guesses, and what accepted guesses have saved. Guesses are paid
    from it, and none is made that costs more than there is, if all are wrong. So after any number of steps

        time with speculation <= (1 + WATCHED + SHARE) · time without + FIRST_STEPS plain steps

    however seldom guesses are right: no more is drawn than was put in, but for the last time.
    Gains above MOST_STEPS are not kept: from any moment on no more than those are lost again.
    """

    def __init__(self) -> None:
        self._balance_s: float | None = None

    def spare_s(self, plain_s: float) -> float:
        """What guessing may cost, where a step without guesses takes `plain_s`. Below 0 where it cost more than was
        thought: nothing is guessed then, and be it believed to cost nothing."""
        return FIRST_STEPS * plain_s if self._balance_s is None else self._balance_s

    def book(self, plain_s: float, *, saved_s: float, guessing_s: float, rows_s: float) -> None:
        """A step that would have taken `plain_s` without guesses: what accepted ones have saved, and what it took to
        make guesses and to verify them."""
        before_s = FIRST_STEPS * plain_s if self._balance_s is None else self._balance_s
        spent_s = rows_s + max(0.0, guessing_s - WATCHED * plain_s)
        self._balance_s = min(MOST_STEPS * plain_s, before_s + SHARE * plain_s + saved_s - spent_s)
