"""Fixtures of all tests: the shared real data where it is, SmolLM2, and a tiny random Llama made on the spot."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent

# Tests in several processes share the cores: before torch is imported, which counts them once.
if (num_workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_workers)))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real texts, tasks, configs and foreign checkpoints: $LLMQ_SHARED, else the folder `shared` beside this one."""
    folder = Path(os.environ.get("LLMQ_SHARED") or REPOSITORY.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"no shared data: {folder} is not there (set LLMQ_SHARED)")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The bf16 folder of SmolLM2-135M-Instruct, fetched and converted on the first use. For system tests."""
    from llmq.profiles.checkpoint import find_model
    from llmq.profiles.errors import FailedError, InputError

    try:
        return find_model("smollm2-135m")
    except (InputError, FailedError) as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error}")


@pytest.fixture(scope="session")
def cached_model() -> Callable[[str], Path]:
    """cached_model(alias) -> its bf16 folder where it is already: large files under terms of their own, or of none that
    are stated, are nothing that a test fetches unasked. Skips where it is not."""
    from llmq.profiles.cache import cache_dir
    from llmq.profiles.gguf_convert import CONVERTER

    def find(alias: str) -> Path:
        folder = cache_dir() / "models" / f"{alias}-{CONVERTER}"
        if not folder.is_dir():
            pytest.skip(f"{folder} is not there: `llmq inspect {alias}` fetches it")
        return folder

    return find


@pytest.fixture(scope="session")
def tiny_tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 512 words, trained here. Ids 0-2 as SmolLM2's: <|endoftext|> <|im_start|> <|im_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    import pydoc_data.topics

    tokenizer.train_from_iterator(list(pydoc_data.topics.topics.values())[:8], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_json: Path) -> Callable[..., Path]:
    """tiny_llama(**config) -> folder of a random Llama (seed 0) with tokenizer and chat template; one for each config.

    Hidden 64, 2 layers, 4 heads, 2 KV heads, head_dim 16, FFN 128, 512 words, context 256, tied head, float32: any of
    LlamaConfig's names may be given otherwise, and `model_type` ("qwen2", "qwen3", "mistral") and `dtype` too.
    """
    made: dict[tuple, Path] = {}

    def make(*, model_type: str = "llama", dtype: str = "float32", **changes: object) -> Path:
        key = (model_type, dtype, *sorted((name, repr(value)) for name, value in changes.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("tiny")
            _save_tiny(folder, model_type, dtype, changes)
            _save_tokenizer(folder, tiny_tokenizer_json)
            made[key] = folder
        return made[key]

    return make


def _save_tiny(folder: Path, model_type: str, dtype: str, changes: dict) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        **changes,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
    # The default initialisation (0.02) gives nearly equal logits, on which a greedy comparison proves nothing.
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def _save_tokenizer(folder: Path, tokenizer_json: Path) -> None:
    import json
    import shutil

    shutil.copy(tokenizer_json, folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "model_max_length": 256,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
