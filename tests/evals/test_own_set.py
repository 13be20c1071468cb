import json

import pytest

from llmq.evals.own_set import as_lm_eval_task, read_own_set
from llmq.profiles.errors import InputError


@pytest.fixture
def jsonl(tmp_path):
    def write(*lines) -> object:
        path = tmp_path / "mine.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return path

    return write


CHOICES = ["red", "blue", "B"]


@pytest.mark.parametrize(
    ("gold", "index"), [({"gold": 1}, 1), ({"answer": "red"}, 0), ({"label": "C"}, 2), ({"answer": "B"}, 2)]
)
def test_the_right_choice_as_an_index_a_text_or_a_letter(jsonl, gold, index):
    own_set = read_own_set(jsonl({"question": "Which?", "choices": CHOICES, **gold}, ""))
    assert own_set.kind == "multiple_choice"
    assert own_set.items == [{"prompt": "Which?", "choices": CHOICES, "gold": index}]


def test_prompt_and_choice_are_joined_by_one_space_whatever_the_file_has(jsonl):
    own_set = read_own_set(jsonl({"query": "It is ", "choices": [" so", "not"], "gold": " so"}))
    assert own_set.items == [{"prompt": "It is", "choices": ["so", "not"], "gold": 0}]


def test_a_generation_set_takes_texts_and_numbers_as_answers(jsonl):
    own_set = read_own_set(jsonl({"prompt": "2+2=", "answer": 4}, {"query": "Say hi", "answer": "hi"}))
    assert (own_set.kind, own_set.name) == ("generate_until", "mine")
    assert [item["answer"] for item in own_set.items] == ["4", "hi"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON: Expecting property name enclosed in double quotes at column 2"),
        ("[1]", "line 2: a JSON object is expected, this is list"),
        ({"answer": "x"}, "line 2: exactly one of 'query', 'question', 'prompt' is needed, found none"),
        ({"query": "a", "prompt": "b", "answer": "x"}, "found query, prompt"),
        ({"query": " ", "answer": "x"}, "line 2: the prompt is not a text with something in it"),
        ({"query": "a"}, "line 2: neither 'choices' nor an 'answer'"),
        ({"query": "a", "choices": ["x"], "gold": 0}, "line 2: 'choices' needs two texts or more, this has 1"),
        ({"query": "a", "choices": ["x", " x"], "gold": "x"}, "line 2: the right answer 'x' is not one of the choices"),
        ({"query": "a", "choices": "xy", "gold": 0}, "line 2: 'choices' is not a list of texts"),
        ({"query": "a", "choices": ["x", "y"], "gold": 2}, r"line 2: the right answer 2 is not an index 0\.\.1"),
        ({"query": "a", "choices": ["x", "y"], "gold": True}, "line 2: the right answer True is not an index"),
        ({"query": "a", "choices": ["x", "y"], "gold": "z"}, "line 2: the right answer 'z' is not one of the choices"),
        ({"query": "a", "choices": ["x", "y"]}, "line 2: exactly one of 'gold', 'answer', 'label' is needed"),
        ({"query": "a", "choices": ["x", "y"], "gold": 0}, "line 2 has choices and line 1 has none"),
    ],
)
def test_a_bad_line_is_named(jsonl, line, message):
    with pytest.raises(InputError, match=message):
        read_own_set(jsonl({"prompt": "good", "answer": "line"}, line))


def test_all_bad_lines_are_named_up_to_ten(jsonl):
    with pytest.raises(InputError) as error:
        read_own_set(jsonl(*["{"] * 13))
    assert "line 10" in str(error.value)
    assert "line 11" not in str(error.value)
    assert "and 3 more" in str(error.value)


def test_bytes_that_are_not_utf8_and_missing_or_empty_files(tmp_path):
    path = tmp_path / "x.jsonl"
    with pytest.raises(InputError, match="No such file"):
        read_own_set(path)
    path.write_bytes(b"\n")
    with pytest.raises(InputError, match="has no item"):
        read_own_set(path)
    path.write_bytes(b'{"prompt": "caf\xe9", "answer": "x"}')
    with pytest.raises(InputError, match="line 1: not UTF-8 at byte 15"):
        read_own_set(path)


def test_few_shot_examples_are_the_other_items(jsonl):
    items = [{"prompt": f"question {i}", "answer": f"answer {i}"} for i in range(3)]
    task = as_lm_eval_task(read_own_set(jsonl(*items)))
    task.set_config(key="num_fewshot", value=2)
    task.set_fewshot_seed(seed=1234)
    context = task.fewshot_context(items[1], num_fewshot=2)
    assert context.endswith("question 1")
    assert context.count("question 1") == 1
    assert "question 0 answer 0\n\n" in context
    assert "question 2 answer 2\n\n" in context
