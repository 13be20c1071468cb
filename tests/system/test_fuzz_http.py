"""Schemathesis on our own OpenAPI document, against a real server: whatever it sends, no 500 and no dead engine."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from served import Served

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def server(tiny_llama):
    server = Served(tiny_llama(), "--request-timeout", "20", "--check-integrity")
    yield server
    server.process.kill()
    server.process.wait()


# What a document allows, and what it does not.
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_no_input_is_a_server_error(server, mode):
    document = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    assert {"/v1/completions", "/v1/chat/completions"} <= {operation.path for operation in operations}
    if mode is schemathesis.GenerationMode.NEGATIVE:
        operations = [operation for operation in operations if operation.method.upper() == "POST"]  # GETs take nothing
    for operation in operations:

        @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case):
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "smol"  # else nearly everything ends at 404
            response = case.call(timeout=60)
            case.validate_response(response, checks=[not_a_server_error])
            assert httpx.get(server.url + "/health").status_code == 200

        ask()


def test_the_engine_is_whole_afterwards(server):
    assert server.process.poll() is None
    made = server.complete(prompt="Hello", max_tokens=4, temperature=0)
    assert made["usage"]["completion_tokens"] <= 4
    assert server.metric("llmq_requests_running") == 0
