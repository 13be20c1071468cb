import json
import shutil

import pytest

from llmq.evals.text import EncodedText, check_same_tokenizer, read_text
from llmq.profiles.errors import InputError
from llmq.runtime.frontend.tokenizer import Tokenizer

TEXT = "the value of an expression\n" * 20


@pytest.fixture
def changed_copy(tiny_llama, tmp_path):
    """changed_copy(edit) -> the tiny model's tokenizer after `edit(tokenizer.json content)`."""

    def make(edit) -> Tokenizer:
        shutil.copytree(tiny_llama(), tmp_path / "copy")
        path = tmp_path / "copy" / "tokenizer.json"
        content = json.loads(path.read_text())
        edit(content)
        path.write_text(json.dumps(content, indent=1))
        return Tokenizer.from_folder(tmp_path / "copy")

    return make


def test_no_bos_where_the_tokenizer_adds_none_and_counts_of_a_part(tiny_llama):
    text = EncodedText.encode(TEXT, "t", Tokenizer.from_folder(tiny_llama()))
    assert text.prefix == ()
    assert text.bos_policy.startswith("no BOS")
    whole = text.counts(len(text.token_ids))
    assert (whole.num_words, whole.num_bytes) == (100, len(TEXT))
    part = text.counts(len(text.token_ids) // 2)
    assert part.num_bytes == pytest.approx(len(TEXT) / 2, abs=8)


def test_a_bos_that_the_tokenizer_adds_stands_before_every_window_and_is_no_part_of_the_text(changed_copy):
    def add_bos(content):
        ids = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}]
        special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [*ids, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [*ids, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": special,
        }

    text = EncodedText.encode(TEXT, "t", changed_copy(add_bos))
    assert text.prefix == (1,)
    assert text.token_ids[0] != 1
    assert "before every window" in text.bos_policy


def test_a_tokenizer_saved_anew_is_the_same_and_one_with_two_words_swapped_is_not(tiny_llama, changed_copy):
    original = Tokenizer.from_folder(tiny_llama())
    text = EncodedText.encode(TEXT, "t", original)

    def swap(content):
        vocab = content["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    check_same_tokenizer(original, original, text)
    with pytest.raises(InputError, match=r"token \d+ is b'[ab]' to the baseline and b'[ab]' to the candidate"):
        check_same_tokenizer(changed_copy(swap), original, text)


def test_a_tokenizer_that_cuts_words_otherwise_is_refused(tiny_llama, changed_copy):
    original = Tokenizer.from_folder(tiny_llama())
    text = EncodedText.encode(TEXT, "t", original)
    with pytest.raises(InputError, match="encode t differently"):
        check_same_tokenizer(changed_copy(lambda content: content["model"]["merges"].clear()), original, text)


def test_a_file_that_is_no_text_is_refused_with_the_place(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="not UTF-8 text: byte 3"):
        read_text(path)
    with pytest.raises(InputError, match="No such file"):
        read_text(tmp_path / "absent.txt")
