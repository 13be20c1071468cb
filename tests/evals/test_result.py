import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmq.evals.result import check_output_path, checkpoint_sha256, plain_json, save_record, tokenizer_sha256
from llmq.profiles.errors import InputError


@pytest.fixture
def copy(tiny_llama, tmp_path):
    return shutil.copytree(tiny_llama(), tmp_path / "copy")


def test_a_checkpoint_is_another_one_when_its_values_or_config_change(tiny_llama, copy):
    original = checkpoint_sha256(tiny_llama())
    assert checkpoint_sha256(copy) == original
    path = copy / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "up_proj" in name)
    save_file({**tensors, name: tensors[name] + 1}, path)
    changed = checkpoint_sha256(copy)
    assert changed != original
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    assert checkpoint_sha256(copy) not in (original, changed)


def test_a_tokenizer_saved_anew_has_the_same_hash(tiny_llama, copy):
    path = copy / "tokenizer.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "truncation": {"max_length": 8}}, indent=4))
    assert tokenizer_sha256(copy) == tokenizer_sha256(tiny_llama())
    content["model"]["vocab"]["brand new"] = 512
    path.write_text(json.dumps(content))
    assert tokenizer_sha256(copy) != tokenizer_sha256(tiny_llama())


def test_a_record_is_written_whole_and_is_json_whatever_the_numbers(tmp_path):
    save_record({"ppl": math.inf, "windows": (1, 2)}, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == {"ppl": None, "windows": [1, 2]}
    with pytest.raises(TypeError):
        save_record({"tensor": torch.zeros(1)}, tmp_path / "r.json")
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert plain_json({1: math.nan}) == {"1": None}


def test_an_output_that_could_not_be_written_is_refused_before_any_work(tmp_path):
    check_output_path(tmp_path / "r.json")
    with pytest.raises(InputError, match="is a folder"):
        check_output_path(tmp_path)
    with pytest.raises(InputError, match="there is no folder"):
        check_output_path(tmp_path / "no" / "r.json")
