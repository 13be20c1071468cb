"""--recipe: what a file says, what the command line says over it, and what is refused by key."""

import pytest

from llmq.profiles.errors import InputError
from llmq.quantize.recipe_file import build_recipe, read_recipe_file

FILE = """
method = "rtn"
bits = 8
group_size = 32
ignore = ["layers.1"]

[[layers]]
match = "down_proj"
bits = 4

[[layers]]
match = ["re:.*q_proj", "k_proj", "v_proj"]
method = "awq"

[[layers]]
match = "o_proj"
ignore = true
"""


def build(tmp_path, text=FILE, **given):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return build_recipe(read_recipe_file(path), {"method": None, "ignore": None, **given})


def test_a_rule_inherits_what_it_does_not_say(tmp_path):
    recipe = build(tmp_path)
    assert (recipe.method, recipe.bits, recipe.group_size) == ("rtn", 8, 32)
    down, qkv, o = recipe.rules
    assert (down.settings.bits, down.settings.group_size) == (4, 32)
    assert (qkv.settings.method, qkv.settings.bits, qkv.settings.group_size) == ("awq", 4, "auto")  # its own defaults
    assert qkv.patterns == ("re:.*q_proj", "k_proj", "v_proj")
    assert o.settings is None
    assert recipe.ignore == ("layers.1",)
    assert recipe.is_calibrated  # because a rule asks for AWQ


def test_the_command_line_wins(tmp_path):
    recipe = build(tmp_path, bits=4, ignore=["layers.0"])
    assert (recipe.bits, recipe.group_size, recipe.rules[0].settings.bits) == (4, 32, 4)
    assert recipe.ignore == ("layers.1", "layers.0")
    other = build(tmp_path, method="awq")
    assert (other.method, other.bits, other.group_size) == ("awq", 4, "auto")  # the file's numbers were rtn's


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bitz = 4", "unknown key 'bitz' (did you mean 'bits'?)"),
        ('bits = "4"', "bits = '4': int is expected"),
        ("bits = true", "bits = True: int is expected"),
        ("bits =", "recipe.toml"),
        ('[[layers]]\nmatsch = "q_proj"', "[[layers]] 1: unknown key 'matsch' (did you mean 'match'?)"),
        ("[[layers]]\nbits = 4", "no `match`"),
        ('[[layers]]\nmatch = "x"', "it sets nothing"),
        ('[[layers]]\nmatch = "x"\nignore = true\nbits = 8', "nothing else can be set"),
        ('[[layers]]\nmatch = "x"\nmethod = "gtpq"', "did you mean 'gptq'?"),
        ('[[layers]]\nmatch = "x"\nbits = 5', "--bits 5 is not supported"),
        ("layers = [3]", "a table is expected"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, text, words):
    with pytest.raises(InputError) as raised:
        build(tmp_path, text, method="rtn")
    assert words in str(raised.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_recipe_file(tmp_path / "none.toml")
