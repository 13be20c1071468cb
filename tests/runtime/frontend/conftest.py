"""Tokenizers of both kinds that decoders have: byte-level BPE and SentencePiece with byte fallback."""

import json
from pathlib import Path

import pytest

from llmq.runtime.frontend.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_folder(folder: Path, tokenizer_json: str, *, template: str | None = CHATML, **config: object) -> Path:
    """A model folder as far as a tokenizer reads it."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def byte_level_folder(tiny_tokenizer_json: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(
        tmp_path_factory.mktemp("byte_level"),
        tiny_tokenizer_json.read_text(),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )


@pytest.fixture(scope="session")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder)


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama-2's arrangement: `▁` for spaces, `<0xNN>` for unknown bytes, BOS added, one leading space lost."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_tokens = [AddedToken(f"<0x{byte:02X}>", normalized=False) for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog sat on the log"] * 4, trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = data["added_tokens"][:3]  # the byte tokens are plain words of the vocabulary
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
        "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
    )
    return write_folder(
        tmp_path_factory.mktemp("sentencepiece"),
        tokenizer.to_str(),
        template=template,
        bos_token="<s>",
        eos_token={"__type": "AddedToken", "content": "</s>", "special": True},
        unk_token="<unk>",
    )


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(sentencepiece_folder)


@pytest.fixture(scope="session")
def smollm2_tokenizer(shared: Path) -> Tokenizer:
    return Tokenizer.from_folder(shared / "data/tokenizers/smollm2-135m-instruct")
