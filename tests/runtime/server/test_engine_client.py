"""The engine's process: started, spoken to, and gone, in each way that it can go."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager

import fake_engine
import msgspec
import pytest

from llmq.runtime.config import EngineConfig
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.server.engine_client import STALL_BUSY_S, STALL_IDLE_S, EngineClient, EngineDeadError


def request(request_id: str, prompt: Sequence[int] = (5, 6, 7), **params) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling_params=SamplingParams(**params))


@asynccontextmanager
async def started(command: list[str], **config):
    client = EngineClient(EngineConfig(model="tiny", **config), command=command)
    try:
        yield client, await client.start()
    finally:
        await client.stop()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_requests_and_outputs_travel(fake_command: list[str]):
    async def body():
        stats = []
        client = EngineClient(EngineConfig(model="tiny"), command=fake_command, on_stats=stats.append)
        info = await client.start()
        assert (info.max_model_len, client.trouble()) == (256, None)
        stream = client.open()
        stream.add([request("a", max_tokens=3, logprobs=1), request("b", max_tokens=2)])
        tokens: dict[str, list[int]] = {"a": [], "b": []}
        async for output in stream:
            tokens[output.request_id] += output.new_token_ids
            assert (output.logprobs is not None) == (output.request_id == "a")
        assert tokens == {"a": [100, 101, 102], "b": [100, 101]}
        assert client.num_unfinished == 0
        await client.stop()
        assert (stats[-1].num_running, client.exit_code) == (0, 0)

    run(body())


def test_a_request_that_the_engine_refuses_harms_no_other(fake_command: list[str]):
    async def body():
        async with started(fake_command) as (client, _):
            stream = client.open()
            bad = msgspec.structs.replace(request("bad", [fake_engine.REFUSED]), forks=[("worse", 1)])
            stream.add([bad, request("good", max_tokens=2)])
            ends = {output.request_id: output async for output in stream if output.finish_reason}
            assert ends["worse"].error == "refused on arrival"
            assert (ends["bad"].finish_reason, ends["bad"].error) == ("error", "refused on arrival")
            assert ends["good"].finish_reason == "length"

    run(body())


def test_closing_a_stream_aborts_what_runs(fake_command: list[str]):
    async def body():
        stats = []
        client = EngineClient(
            EngineConfig(model="tiny", max_model_len=10**6), command=fake_command, on_stats=stats.append
        )
        await client.start()
        stream = client.open()
        stream.add([request("a", max_tokens=500_000)])
        await anext(aiter(stream))
        stream.close()
        while stats[-1].num_running:
            await asyncio.sleep(0.01)
        assert client.num_unfinished == 0
        await client.stop()

    run(body())


@pytest.mark.parametrize("how", ["step raises", "killed"])
def test_a_dead_engine_ends_every_stream(fake_command: list[str], how: str):
    async def body():
        async with started(fake_command, max_model_len=10**6) as (client, _):
            stream, other = client.open(), client.open()
            stream.add([request("a", max_tokens=500_000)])
            other.add([request("b", max_tokens=500_000)])
            if how == "killed":
                os.kill(client._process.pid, signal.SIGKILL)
            else:
                client.open().add([request("c", [fake_engine.FATAL])])
            for one in (stream, other):
                with pytest.raises(EngineDeadError, match="the forward failed" if how != "killed" else "signal 9"):
                    async for _ in one:
                        pass
            assert client.died.is_set()
            assert "dead" in client.trouble()
            assert client.exit_code == 1
            with pytest.raises(EngineDeadError):
                client.open().add([request("d")])

    run(body())


def test_an_engine_that_cannot_start_says_why(fake_command: list[str]):
    async def body():
        with pytest.raises(EngineDeadError, match="unlucky") as refused:
            async with started(fake_command, max_num_seqs=13):
                pass
        assert refused.value.exit_code == 2
        with pytest.raises(EngineDeadError, match="exit code 7"):
            async with started([sys.executable, "-c", "import sys; sys.exit(7)"]):
                pass

    run(body())


def test_the_engine_ends_with_its_parent(fake_command: list[str]):
    """The parent is killed outright, so that it can tell nobody."""
    script = (
        "import asyncio, sys\n"
        "from llmq.runtime.config import EngineConfig\n"
        "from llmq.runtime.server.engine_client import EngineClient\n"
        "async def main():\n"
        "    client = EngineClient(EngineConfig(model='tiny'), command=sys.argv[1:])\n"
        "    await client.start()\n"
        "    print(client._process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, *fake_command], stdout=subprocess.PIPE)
    child_pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while _is_running(child_pid):
        assert time.monotonic() < deadline, "the engine outlived its parent"
        time.sleep(0.02)


def test_health_is_the_age_of_the_last_step(fake_command: list[str]):
    async def body():
        now = [0.0]
        client = EngineClient(EngineConfig(model="tiny"), command=fake_command, clock=lambda: now[0])
        client._send = lambda message: None  # nobody answers: an engine that hangs
        assert client.trouble() is None
        now[0] += STALL_IDLE_S + 1
        assert "no step for 11.0 s" in client.trouble()
        client.open().add([request("a")])
        assert client.trouble() is None, "silence before the work came is no standstill"
        now[0] += STALL_BUSY_S
        assert client.trouble() is None
        now[0] += 1
        assert "1 request waiting" in client.trouble()
        client._note_progress()  # the step was long, and ended
        now[0] += STALL_BUSY_S + 2
        assert client.trouble() is None, "what took a minute once may take it again"
        await client.stop()

    run(body())


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
