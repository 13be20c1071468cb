"""llmq's own engine on the peers' work: `peer_llmq.py NAME MODEL [STREAMS]`, run by `peer_worker.py`."""

import sys

from workload import measure

from llmq.profiles.checkpoint import find_model
from llmq.runtime.config import EngineConfig
from llmq.runtime.engine import Engine
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams

name, model, streams = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 16
# As OpenVINO does unless it is told otherwise: on a CPU its KV_CACHE_PRECISION is uint8_t, and its
# DYNAMIC_QUANTIZATION_GROUP_SIZE 32 (2026.4.1).
rounds = name == "llmq-int8"
config = EngineConfig(
    model=str(find_model(model, keep_blocks=True)),
    max_num_seqs=streams,
    threads=2,
    enable_prefix_caching=False,
    activations="int8" if rounds else "auto",
    kv_dtype="int8" if rounds else "auto",
)
engine = Engine.from_config(config)


def generate(requests: list[tuple[list[int], int]]) -> int:
    for number, (ids, new) in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        engine.add_request(EngineRequest(request_id=str(number), prompt_token_ids=ids, sampling_params=params))
    made = 0
    while engine.has_unfinished_requests:
        made += sum(len(output.new_token_ids) for output in engine.step())
    return made


def weights_read_bytes() -> int:
    from bench_decode import weights_read_bytes

    return weights_read_bytes(engine)


generate.weights_read_bytes = weights_read_bytes
measure(name, generate, (streams,))
