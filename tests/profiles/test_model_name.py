import pytest

from llmq.profiles.errors import InputError
from llmq.profiles.model_name import ALIASES, parse_model_name


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smol").mkdir()
    (tmp_path / "smol" / "config.json").write_text("{}")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "qwen").mkdir()
    (tmp_path / "models" / "tiny.gguf").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("smol", "folder"),
        ("./smol", "folder"),
        ("smol/config.json", "config"),
        ("models/tiny.gguf", "gguf"),
        ("models", "gguf"),  # a folder that holds one GGUF and no config.json
        ("smollm2-135m", "alias"),
        ("Qwen/Qwen3-0.6B", "hub"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "hub"),
    ],
)
def test_what_a_name_means(name, kind):
    assert parse_model_name(name).kind == kind


def test_a_folder_of_the_alias_s_name_comes_first(here):
    (here / "smollm2-135m").mkdir()
    assert parse_model_name("smollm2-135m").kind == "folder"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./smoll", "no such folder ./smoll (did you mean ./smol?)"),
        ("smoll", "no such folder smoll (did you mean smol?)"),
        ("smollm2-135", "no such folder smollm2-135 (did you mean smollm2-135m?)"),
        ("models/qwem", "no such folder models/qwem (did you mean models/qwen?)"),
        ("models/tinny.gguf", "no such file models/tinny.gguf (did you mean models/tiny.gguf?)"),
        ("./nowhere/x", "no such folder ./nowhere/x (there is no folder nowhere either)"),
        ("zzzzzzzz", f"no such folder zzzzzzzz (a hub id is org/name; the aliases are {', '.join(ALIASES)})"),
        ("a/b/c", "no such folder a/b/c (there is no folder a/b either)"),
    ],
)
def test_a_path_that_is_not_there_is_no_hub_id_and_names_the_nearest(name, message):
    with pytest.raises(InputError) as raised:
        parse_model_name(name)
    assert str(raised.value) == message
    assert raised.value.exit_code == 2


def test_several_ggufs_are_not_chosen_from(here):
    (here / "models" / "other.gguf").write_text("")
    with pytest.raises(InputError, match=r"models holds 2 GGUF files; name one of other\.gguf, tiny\.gguf"):
        parse_model_name("models")


@pytest.mark.parametrize("name", ["", "  "])
def test_empty(name):
    with pytest.raises(InputError, match="MODEL is empty"):
        parse_model_name(name)


def test_a_file_of_weights_is_not_a_model(here):
    (here / "smol" / "model.safetensors").write_text("")
    with pytest.raises(InputError, match="give the folder that holds the model"):
        parse_model_name("smol/model.safetensors")
