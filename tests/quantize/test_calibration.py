"""Texts -> tokens: what is used, what is dropped, what is refused, and that the same seed gives the same samples."""

import json

import pytest

from llmq.profiles.errors import InputError
from llmq.quantize.builtin_text import builtin_documents, builtin_text
from llmq.quantize.calibration import check_source, load_calibration, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    """pad id == eos id == 2, as SmolLM2's; adds no BOS."""
    return load_tokenizer(tiny_llama())


@pytest.fixture(scope="module")
def bos_tokenizer(tiny_llama):
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(tiny_llama())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    return tokenizer


def write_jsonl(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return str(path)


def test_records_stay_apart_and_empties_are_dropped_and_counted(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "c.jsonl", [{"text": "one two"}, {"text": ""}, {"text": " \n"}, {"text": "three"}])
    calibration = load_calibration(source, tokenizer, num_samples=10, seq_len=16)
    assert [tokenizer.decode(ids) for ids in calibration.samples] == ["one two", "three"]
    assert calibration.provenance.num_texts == 4
    assert calibration.provenance.num_empty == 2
    assert calibration.num_tokens == sum(map(len, calibration.samples))


def test_an_end_token_inside_a_text_counts_although_it_is_the_pad_token(tmp_path, tokenizer):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    source = write_jsonl(tmp_path / "c.jsonl", [{"text": "yes<|im_end|>no<|im_end|>"}])
    (ids,) = load_calibration(source, tokenizer).samples
    assert ids.count(2) == 2
    assert ids[-1] == 2


def test_a_text_of_three_tokens_is_a_sample(tmp_path, tokenizer):
    text = tokenizer.decode([300, 301, 302])
    length = len(tokenizer(text)["input_ids"])
    calibration = load_calibration(write_jsonl(tmp_path / "c.jsonl", [{"text": text}]), tokenizer)
    assert calibration.num_tokens == length <= 3


def test_long_texts_are_cut_and_counted(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "c.jsonl", [{"text": "word " * 100}, {"text": "short"}])
    calibration = load_calibration(source, tokenizer, seq_len=8)
    assert len(calibration.samples[0]) == 8
    assert calibration.provenance.num_truncated == 1


def test_messages_are_rendered_with_the_chat_template(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "c.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}])
    calibration = load_calibration(source, tokenizer)
    assert tokenizer.decode(calibration.samples[0]) == "<|im_start|>user\nHi<|im_end|>\n"
    assert calibration.provenance.rendering == "chat template"


def test_messages_without_a_template_are_refused(tmp_path, tiny_llama):
    tokenizer = load_tokenizer(tiny_llama())
    tokenizer.chat_template = None
    source = write_jsonl(tmp_path / "c.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}])
    with pytest.raises(InputError, match="chat template"):
        load_calibration(source, tokenizer)


def test_prompt_and_completion_are_one_text(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "c.jsonl", [{"prompt": "2+2=", "completion": "4"}, {"prompt": "only"}])
    samples = load_calibration(source, tokenizer).samples
    assert [tokenizer.decode(ids) for ids in samples] == ["2+2=4", "only"]


def test_plain_text_is_cut_into_whole_pieces(tmp_path, tokenizer):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox " * 50, encoding="utf-8")
    ids = tokenizer(path.read_text())["input_ids"]
    calibration = load_calibration(str(path), tokenizer, num_samples=1000, seq_len=20)
    assert all(len(sample) == 20 for sample in calibration.samples)
    assert [i for sample in calibration.samples for i in sample] == ids[: len(ids) // 20 * 20]


def test_the_seed_decides_which_pieces(tmp_path, tokenizer):
    path = tmp_path / "text.txt"
    path.write_text(builtin_text("heldout")[:20000], encoding="utf-8")
    first = load_calibration(str(path), tokenizer, num_samples=4, seq_len=32, seed=1)
    assert first == load_calibration(str(path), tokenizer, num_samples=4, seq_len=32, seed=1)
    assert first.samples != load_calibration(str(path), tokenizer, num_samples=4, seq_len=32, seed=2).samples


def test_every_sample_begins_with_the_bos_that_the_tokenizer_adds(tmp_path, bos_tokenizer):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox " * 50, encoding="utf-8")
    calibration = load_calibration(str(path), bos_tokenizer, seq_len=20)
    assert all(sample[0] == 1 and 1 not in sample[1:] and len(sample) == 20 for sample in calibration.samples)
    assert "[1]" in calibration.provenance.bos


def test_a_template_that_writes_the_bos_gets_no_second_one(tmp_path, bos_tokenizer):
    source = write_jsonl(tmp_path / "c.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}])
    (ids,) = load_calibration(source, bos_tokenizer).samples
    assert ids.count(1) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}\n{oops', "line 2: not JSON"),
        ('{"txt": "a"}', r"line 1: no \"text\""),
        ("[1]", "line 1"),
        ('{"text": ""}', "holds no token"),
        ('{"text": "a"}\n\n{"text": 5}', 'line 3: "text" is int, a string is expected'),
        ('{"text": null}', '"text" is NoneType'),
        ('{"prompt": null}', '"prompt" is NoneType'),
        ('{"prompt": "a", "completion": ["b"]}', '"completion" is list'),
        ('{"messages": "hello"}', 'line 1: "messages" is no list of messages'),
        ('{"messages": [{"role": "user"}]}', "record 1: the chat template refuses it"),
        ('{"text": "\\ud800"}', "line 1: .* half a character"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "record 1: the chat template refuses it"),
        ("[" * 100_000, "line 1: nested too deeply"),
        ('{"text": "a\0"}', "holds a NUL"),
        ("", "is empty"),
    ],
)
def test_malformed_files_are_refused_with_the_place(tmp_path, tokenizer, content, words):
    path = tmp_path / "c.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=words):
        load_calibration(str(path), tokenizer)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}', "an array of records is expected"),
        ('[{"text": "a"}, 5]', "record 2: no .text., .messages. or .prompt. in it, but int"),
        ("[", "not JSON"),
    ],
)
def test_json_is_an_array_of_records_or_refused(tmp_path, tokenizer, content, words):
    path = tmp_path / "c.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=words):
        load_calibration(str(path), tokenizer)


def test_an_array_of_records_is_read_as_they_are_a_line_each(tmp_path, tokenizer):
    records = [{"text": "One."}, {"prompt": "Two", "completion": "."}]
    (tmp_path / "c.json").write_text(json.dumps(records))
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, records)))
    array, lines = (load_calibration(str(tmp_path / name), tokenizer).samples for name in ("c.json", "c.jsonl"))
    assert array == lines
    assert len(array) == 2


@pytest.mark.parametrize("content", ["  \n\n ", "\ufeff", "\0" * 100])
def test_a_text_without_a_word_is_none(tmp_path, tokenizer, content):
    (tmp_path / "c.txt").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=r"holds no token|holds a NUL"):
        load_calibration(str(tmp_path / "c.txt"), tokenizer)


@pytest.mark.parametrize("name", ["c.txt", "c.jsonl"])
def test_the_mark_that_editors_put_first_is_no_text(tmp_path, tokenizer, name):
    content = '{"text": "A word."}' if name == "c.jsonl" else "A word."
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    marked = load_calibration(str(tmp_path / name), tokenizer).samples
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert marked == load_calibration(str(tmp_path / name), tokenizer).samples


@pytest.mark.parametrize("source", ["missing.txt", "./missing", "/no/such/file", "plainword"])
def test_a_missing_file_is_no_dataset(source):
    with pytest.raises(InputError, match="no such file"):
        check_source(source)


def test_a_dataset_offline_is_refused_at_once(monkeypatch):
    monkeypatch.setattr("llmq.profiles.hub.is_reachable", lambda: False)
    with pytest.raises(InputError, match="builtin"):
        check_source("org/data")


def test_a_dataset_is_read_by_datasets(monkeypatch, tokenizer):
    asked = {}

    def load_dataset(name, config, *, split, streaming):
        asked.update(name=name, config=config, split=split, streaming=streaming)
        return iter([{"text": "one two"}, {"text": "three"}])

    monkeypatch.setattr("llmq.profiles.hub.is_reachable", lambda: True)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    calibration = load_calibration("org/data:small:validation", tokenizer)
    assert asked == {"name": "org/data", "config": "small", "split": "validation", "streaming": True}
    assert [tokenizer.decode(ids) for ids in calibration.samples] == ["one two", "three"]


def test_a_dataset_without_a_text_column_is_refused(monkeypatch, tokenizer):
    monkeypatch.setattr("llmq.profiles.hub.is_reachable", lambda: True)
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: iter([{"image": 1}]))
    with pytest.raises(InputError, match="image"):
        load_calibration("org/data", tokenizer)


def test_the_builtin_halves_share_no_paragraph():
    def paragraphs(split):
        return {" ".join(text.split()) for document in builtin_documents(split) for text in document}

    ours, heldout = paragraphs("calibration"), paragraphs("heldout")
    assert not ours & heldout
    assert len(builtin_text("calibration")) > 100_000
    assert len(builtin_text("heldout")) > 100_000


def test_builtin_needs_no_network(tokenizer):
    calibration = load_calibration("builtin", tokenizer, num_samples=4, seq_len=64)
    assert calibration.num_tokens == 256
    assert "calibration half" in calibration.provenance.source


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl"])
def test_what_is_not_utf8_is_refused(tmp_path, name):
    """UTF-16 decoded with replacement characters would be calibrated on without a word."""
    (tmp_path / name).write_bytes("A text in another encoding.".encode("utf-16"))
    with pytest.raises(InputError, match="not UTF-8"):
        load_calibration(str(tmp_path / name), tokenizer=None)
