"""How long a request waited is told once, with its first output."""

import time

from engine_driver import greedy

from llmq.runtime.request import EngineRequest


def test_the_wait_until_first_scheduled_comes_with_the_first_output(tiny_llama, make_engine):
    engine = make_engine(tiny_llama(), max_num_seqs=1)
    for number, name in enumerate(("first", "second", "gone")):
        request = EngineRequest(
            request_id=name, prompt_token_ids=[5, 6], sampling_params=greedy(3), arrival_time_s=float(number)
        )
        engine.add_request(request)
    engine.abort(["gone"])
    time.sleep(0.02)
    waits: dict[str, list[float | None]] = {"first": [], "second": []}
    while engine.has_unfinished_requests:
        for output in engine.step():
            waits[output.request_id].append(output.queue_s)
    assert all(len(told) == 3 and told[1:] == [None, None] for told in waits.values())
    assert 0.02 <= waits["first"][0] < waits["second"][0]
    assert not engine._clock._arrivals_s
    assert not engine._clock._waits_s
