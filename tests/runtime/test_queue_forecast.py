"""Who is told at once that the first token would be late: held against what then happens on a machine of known cost."""

from paced_scheduler import Served

from llmq.runtime.queue_forecast import CAUTION, QueueForecast

TTFT_S = 2.0


class Queue(Served):
    """Served, with a clock that steps move and a forecast that is asked before each."""

    def __init__(self, **options) -> None:
        super().__init__(f"ttft={TTFT_S}s,tpot=60ms", **options)
        self.forecast = QueueForecast(self.policy, TTFT_S)
        self.now_s = 100.0
        self.shed: dict[str, float] = {}  # when
        self.first_s: dict[str, float] = {}
        self.due_s: dict[str, float] = {}

    def come(self, name: str, num_prompt_tokens: int = 60, **options) -> None:
        self.due_s[name] = self.now_s
        self.now_s += 1e-6  # of two that came at the same moment the later would go first
        self.add(name, num_prompt_tokens, arrival=self.due_s[name], **options)

    def look(self) -> list:
        late = self.forecast.late(self.scheduler, self.now_s)
        for one in late:
            self.shed[one.request.request_id] = self.now_s
            self.scheduler.abort(one.request.request_id)
        return late

    def go(self) -> None:
        """One step."""
        plan, seconds = self.step()
        self.now_s += seconds
        for one in plan.scheduled:
            if one.samples:
                self.first_s.setdefault(one.request_id, self.now_s)

    def run_out(self) -> None:
        while self.scheduler.has_requests:
            self.look()
            if self.scheduler.has_requests:
                self.go()

    def ttft_s(self, name: str) -> float:
        return self.first_s[name] - self.due_s[name]


def test_of_a_crowd_those_are_let_in_whose_turn_comes_in_time():
    queue = Queue()
    for number in range(80):
        queue.come(f"{number:02d}", max_tokens=40)
    late = {one.request.request_id: one for one in queue.look()}
    kept = [name for name in queue.due_s if name not in late]
    assert 5 < len(kept) < 75
    assert sorted(late) == sorted(queue.due_s)[len(kept) :]  # the last that came
    queue.run_out()
    assert sorted(queue.shed) == sorted(late)  # nobody was let in and shed later
    assert max(queue.ttft_s(name) for name in kept) <= TTFT_S
    # And not too many were sent away: the last that was let in used up what caution left of the time.
    assert max(queue.ttft_s(name) for name in kept) > 0.7 * TTFT_S / CAUTION


def test_when_to_come_back_is_about_when_the_queue_has_become_short_enough():
    waits = []
    for later_s in (0.0, None):
        queue = Queue()
        for number in range(60):
            queue.come(f"{number:02d}", max_tokens=40)
        last = queue.look()[-1]
        assert last.ttft_s > TTFT_S
        waits.append(last.retry_after_s)
        again_s = queue.now_s + (1.2 * last.retry_after_s if later_s is None else later_s)
        while queue.now_s < again_s:
            queue.go()
        queue.come("again", max_tokens=40)
        is_late = "again" in {one.request.request_id for one in queue.look()}
        assert is_late == (later_s is not None)
    assert waits[0] == waits[1] > 0


def test_an_idle_server_turns_nobody_away_whom_it_can_answer():
    queue = Queue()
    queue.come("short")
    queue.come("long", 500)
    assert queue.look() == []
    queue.come("endless", 2000)  # 2000 tokens take longer than the promise, whoever else there is
    assert [one.request.request_id for one in queue.look()] == ["endless"]


def test_who_was_let_in_is_shed_only_where_it_could_not_be_next_in_time():
    queue = Queue()
    queue.come("first", max_tokens=400)
    queue.look()
    queue.go()
    queue.come("waiting", 60)
    assert queue.look() == []
    queue.now_s += 0.8 * TTFT_S  # the machine stood still: by the whole forecast it is late now
    assert queue.look() == []
    queue.now_s += 0.19 * TTFT_S
    assert [one.request.request_id for one in queue.look()] == ["waiting"]


def test_who_has_brought_tokens_is_never_shed():
    queue = Queue()
    queue.come("old", 60, max_tokens=100)
    queue.look()
    for _ in range(3):
        queue.go()
    request = queue.scheduler.running[0]
    queue.scheduler._preempt(request)
    queue.now_s += 10 * TTFT_S
    assert queue.look() == []
    assert request in queue.scheduler.waiting


def test_a_prefix_that_is_cached_is_not_waited_for():
    queue = Queue(enable_prefix_caching=True)
    queue.come("before", 2000, max_tokens=1)
    while queue.scheduler.has_requests:
        queue.go()
    queue.come("again", 2000)
    assert queue.look() == []


def test_a_short_prompt_is_not_told_the_time_of_a_full_step():
    """Of 256 tokens a step takes 0.3 s here: who promises less could answer nobody."""
    queue = Queue()
    queue.forecast = QueueForecast(queue.policy, 0.1)
    queue.come("short", 20, max_tokens=1)
    assert queue.look() == []
    queue.go()
    assert queue.ttft_s("short") < 0.05
    queue.come("longer", 150)
    assert [one.request.request_id for one in queue.look()] == ["longer"]
