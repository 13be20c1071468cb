import json

from llmq.profiles.tokenizer_facts import tokenizer_facts


def test_smollm2_s_tokenizer(shared):
    folder = shared / "data" / "tokenizers" / "smollm2-135m-instruct"
    facts = tokenizer_facts(folder, json.loads((folder / "config.json").read_text()))
    assert facts.vocab_size == 49_152
    assert facts.special_tokens == {"bos": ("<|im_start|>", 1), "eos": ("<|im_end|>", 2), "pad": ("<|im_end|>", 2)}
    assert facts.stop_ids == (2,)
    assert facts.adds_bos is False
    assert facts.has_chat_template


def write(folder, **files: dict) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_a_template_processor_that_begins_with_a_special_token_adds_bos(tmp_path):
    processor = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel"},
            {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]},
        ],
    }
    write(
        tmp_path,
        tokenizer={
            "model": {"vocab": {"a": 0}},
            "added_tokens": [{"id": 1, "content": "<s>"}],
            "post_processor": processor,
        },
        tokenizer_config={"bos_token": {"content": "<s>"}},
        generation_config={"eos_token_id": [7, 8]},
    )
    facts = tokenizer_facts(tmp_path, {"eos_token_id": 3})
    assert facts.adds_bos is True
    assert facts.special_tokens["bos"] == ("<s>", 1)
    assert facts.special_tokens["eos"] == (None, 3)
    assert facts.stop_ids == (7, 8)
    assert not facts.has_chat_template


def test_an_end_token_behind_the_text_is_no_bos(tmp_path):
    single = [{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "</s>"}}]
    write(tmp_path, tokenizer={"post_processor": {"type": "TemplateProcessing", "single": single}})
    assert tokenizer_facts(tmp_path, {}).adds_bos is False


def test_a_folder_without_a_tokenizer_says_nothing(tmp_path):
    facts = tokenizer_facts(tmp_path, {"bos_token_id": 1, "eos_token_id": [2, 3]})
    assert facts.vocab_size is None
    assert facts.adds_bos is None
    assert facts.special_tokens == {"bos": (None, 1), "eos": (None, 2), "pad": (None, None)}
    assert facts.stop_ids == (2, 3)
