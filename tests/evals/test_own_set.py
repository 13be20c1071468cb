import json

import pytest

from llmq.evals.own_set import read_own_set
from llmq.evals.own_task import as_lm_eval_task, check_options
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
    assert (own_set.kind, own_set.name) == ("generation", "mine")
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
        (
            {"query": "a", "choices": ["x", "y"], "gold": 0},
            "line 1 is of the kind generation and line 2 multiple choice",
        ),
        (
            {"prompt": "a", "answer": "x", "match": "fuzzy"},
            "'match' is one of exact, contains, regex, numeric, not",
        ),
        (
            {"prompt": "a", "answer": "(", "match": "regex"},
            r"the answer '\(' is no regular expression: missing",
        ),
        ({"prompt": "a", "answer": "four", "match": "numeric"}, "line 2: the answer 'four' is no number"),
        ({"prompt": "a", "answer": "x", "stop": [""]}, "line 2: 'stop' is not a text or a list of texts"),
        (
            {"prompt": "a", "answer": "x", "max_tokens": 0},
            "'max_tokens' is a whole number of at least 1, not 0",
        ),
        ({"query": "a", "choices": ["x", "y"], "gold": 0, "match": "regex"}, "line 2: 'match' belongs to an answer to"),
        ({"text": " "}, "line 2: 'text' is not a text with something in it"),
        ({"text": "a", "stop": "b"}, "line 2: 'stop' belongs to an answer, and this line is a text"),
        ({"messages": [], "answer": "x"}, "line 2: 'messages' is not a list of"),
        ({"messages": [{"role": "bot", "content": "a"}], "answer": "x"}, "message 1: the role is one of system, user"),
        ({"messages": [{"role": "user"}], "answer": "x"}, "line 2: message 1 is not"),
        ({"messages": [{"role": "assistant", "content": "a"}], "answer": "x"}, "the last message is the assistant's"),
        (
            {"messages": [{"role": "user", "content": "a"}], "prompt": "b", "answer": "x"},
            "'prompt' belongs to a prompt",
        ),
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
    context = task.fewshot_context(task.dataset["test"][1], num_fewshot=2)
    assert context.endswith("question 1")
    assert context.count("question 1") == 1
    assert "question 0 answer 0\n\n" in context
    assert "question 2 answer 2\n\n" in context


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "answer": "x"}, {}, "give --apply-chat-template"),
        (
            {"messages": [{"role": "user", "content": "a"}], "answer": "x"},
            {"apply_chat_template": True, "num_fewshot": 2},
            "leave --num-fewshot away",
        ),
        ({"text": "a b"}, {"apply_chat_template": True}, "are about prompts"),
        ({"text": "a b"}, {"max_drop": 0.01}, "no right answer that --max-drop could count"),
    ],
)
def test_options_that_a_kind_of_set_has_no_use_for_are_refused(jsonl, line, options, message):
    with pytest.raises(InputError, match=message):
        check_options(read_own_set(jsonl(line)), **{"num_fewshot": None, "apply_chat_template": False, **options})
