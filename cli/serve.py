"""`llmq serve`: an OpenAI-shaped HTTP server on one model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmq.cli import console
from llmq.cli import engine_options as options
from llmq.profiles.errors import InputError

if TYPE_CHECKING:
    from llmq.evals.proof import Proof
    from llmq.profiles.slo import Slo
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.dtypes import Dtypes

app = typer.Typer(add_completion=False)


@app.command()
def serve(
    model: options.Model,
    dtype: options.Dtype = "auto",
    kv_dtype: options.KvDtype = "auto",
    kv_cache_memory: options.KvCacheMemory = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(help="Share of a GPU to use, for weights and KV-cache.  [default: 0.9]", show_default=False),
    ] = None,
    max_model_len: options.MaxModelLen = "auto",
    max_num_seqs: options.MaxNumSeqs = 64,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 512,
    max_queue: Annotated[
        int | None,
        typer.Option(min=0, help="Sequences taken beyond --max-num-seqs, to wait; more get 429. Default: no limit."),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            help="What to promise, as llmq bench has it: ttft=500ms,tpot=50ms@p99. Steps and the batch are kept small "
            "enough for tpot, and who would wait longer than ttft gets 429 with Retry-After.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    device: options.Device = "auto",
    kernels: options.Kernels = "auto",
    head: options.Head = "auto",
    activations: options.Activations = "auto",
    threads: options.Threads = None,
    tp: options.TensorParallel = 1,
    pp: options.PipelineParallel = 1,
    speculative: options.Speculative = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    draft_model: options.DraftModel = None,
    draft_quant: options.DraftQuant = None,
    draft_layers: options.DraftLayers = None,
    speculative_pool: options.SpeculativePool = None,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="On a GPU: compute every step as it comes, in no CUDA graph.")
    ] = False,
    overlap_steps: Annotated[
        bool | None,
        typer.Option(
            "--overlap-steps/--no-overlap-steps",
            help="Schedule the next step while the device computes one. Default: on a GPU, without --slo, "
            "--speculative, --tp and --pp.",
            show_default=False,
        ),
    ] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="The same bits for a request whatever runs beside it. Slower.")
    ] = False,
    check_integrity: Annotated[
        bool, typer.Option("--check-integrity", help="Verify the block pool after every step. For debugging.")
    ] = False,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV-cache of prompts that begin alike.")] = True,
    served_model_name: options.ServedModelName = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="LLMQ_API_KEY",
            help="Wanted on every route but /health. Repeat it for several users, who get fair shares.",
            show_default=False,
        ),
    ] = None,
    salt_per_key: Annotated[
        bool | None,
        typer.Option(
            "--salt-per-key/--no-salt-per-key",
            help="Keys share no prefix cache, so that no key can time what another has sent. "
            "Default: with several keys.",
            show_default=False,
        ),
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option(min=0.001, help="Seconds from arrival to the last token, then 504. Default: no limit."),
    ] = None,
    generation_config: Annotated[
        str,
        typer.Option(
            help="Where temperature, top_p, top_k, min_p and repetition_penalty come from when a request does not "
            "say: model (its generation_config.json) or openai (1, 1, off, off, 1)."
        ),
    ] = "model",
    stall_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds that the engine may stand still, from when /health says so, until the server ends with 1; "
            "0: for ever.",
        ),
    ] = 300,
    proof: Annotated[
        Path | None,
        typer.Option(
            help="RESULT.json of llmq eval with --baseline and --max-drop: serve only on a PASS of this checkpoint, on "
            "the numerics that it was evaluated with.",
            show_default=False,
        ),
    ] = None,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds that running requests get after SIGTERM.")] = 30,
) -> None:
    """Serve a model over HTTP as OpenAI's API: /v1/models, /v1/completions, /v1/chat/completions.

    Also /tokenize, /detokenize, /health (does the engine move forward), /ready, /metrics (Prometheus), /version. Every
    answer has `timings` in milliseconds: queue_ms, ttft_ms, tpot_ms, total_ms.

    SIGTERM or Ctrl-C: new requests get 503, running ones finish, exit 0; a second signal, or one while the model still
    loads, ends at once with 128 + its number. When the engine dies, or stands still for --stall-timeout, every request
    gets 503 and the server exits with 1: a supervisor starts it anew.
    """
    import msgspec

    from llmq.cli.drafter import with_drafter
    from llmq.profiles.checkpoint import find_model
    from llmq.runtime.server.server import ServerConfig
    from llmq.runtime.server.server import serve as run_server

    if gpu_memory_utilization is not None:
        if not 0 < gpu_memory_utilization <= 1:
            raise InputError(f"--gpu-memory-utilization {gpu_memory_utilization}: a share above 0 and up to 1")
        if kv_cache_memory is not None:
            raise InputError("--gpu-memory-utilization and --kv-cache-memory exclude each other: give one of them")
    if any(not key for key in api_key or ()):
        raise InputError("--api-key is empty: give a key, or leave it away")
    if generation_config not in ("model", "openai"):
        raise InputError(f"--generation-config {generation_config}: one of model, openai")
    if salt_per_key and not api_key:
        raise InputError("--salt-per-key: there is no --api-key")
    engine = options.engine_config(
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        kernels=kernels,
        head=head,
        activations=activations,
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        memory_utilization=gpu_memory_utilization,
        enable_prefix_caching=prefix_caching,
        enforce_eager=enforce_eager,
        overlap_steps=overlap_steps,
        batch_invariant=batch_invariant,
        check_integrity=check_integrity,
        slo=_parse_slo(slo),
        speculation=options.speculation(
            speculative, num_speculative_tokens, draft_model, draft_quant, draft_layers, speculative_pool
        ),
        threads=threads,
        tensor_parallel=tp,
        pipeline_parallel=pp,
    )
    proven = _read_proof(proof)
    with console.progress() as progress:
        path = find_model(model, keep_blocks=True, progress=progress)
    engine = with_drafter(msgspec.structs.replace(engine, model=str(path)), draft_model, draft_quant)
    options.check_ranks(path, tp, pp)
    _check_memory(path, engine)
    if proven:
        proven.check_checkpoint(path)
        proven.check_dtypes(_dtypes(path, engine))
    console.status(f"llmq serve: loading {path}")
    exit_code = run_server(
        ServerConfig(
            engine=engine,
            host=host,
            port=port,
            served_model_name=served_model_name or default_name(model),
            api_keys=api_key or [],
            salt_per_key=salt_per_key,
            request_timeout_s=request_timeout,
            generation_config=generation_config,
            max_queue=max_queue,
            drain_timeout_s=drain_timeout,
            stall_timeout_s=stall_timeout or None,
        ),
        check_engine=proven.check_engine if proven else None,
    )
    raise typer.Exit(exit_code)


def default_name(model: str) -> str:
    """What requests call a model that was given as `model`."""
    from pathlib import Path

    path = Path(model)
    if path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else model


def _parse_slo(text: str | None) -> "Slo | None":
    if text is None:
        return None
    from llmq.profiles.slo import Slo

    slo = Slo.parse(text)
    if "e2e" in slo.limits_s:
        raise InputError(
            f"--slo {text}: e2e depends on how long an answer is, which a server does not choose; promise ttft and tpot"
        )
    return slo


def _read_proof(path: Path | None) -> "Proof | None":
    if path is None:
        return None
    from llmq.evals.proof import Proof

    return Proof.read(path)


def _dtypes(path: Path, engine: "EngineConfig") -> "Dtypes":
    from llmq.profiles.checkpoint import read_checkpoint
    from llmq.runtime.dtypes import Dtypes

    checkpoint = read_checkpoint(path)
    return Dtypes.of(checkpoint.architecture.dtype, checkpoint.quantization, engine)


def _check_memory(path: Path, engine: "EngineConfig") -> None:
    """Refuse before any weight is read, and before torch is imported, what cannot fit."""
    from llmq.profiles.checkpoint import read_checkpoint
    from llmq.runtime.memory import plan_kv_cache, with_drafter_layers

    if engine.kv_cache_memory_bytes is None:
        return
    drafter = engine.speculation and engine.speculation.draft_model
    of_drafter = read_checkpoint(Path(drafter)).architecture if drafter else None
    cached = with_drafter_layers(read_checkpoint(path).architecture, of_drafter)
    plan_kv_cache(cached, engine, _dtypes(path, engine), 0)
