"""What may be served on a saved verdict."""

import json
import shutil

import pytest

from llmq.evals.proof import Proof
from llmq.evals.result import SCHEMA, identify_checkpoint
from llmq.profiles.errors import FailedError, InputError
from llmq.runtime.dtypes import Dtypes

FINGERPRINT = {"kernels": "toy", "dtype": "fp32", "kv_dtype": "fp8, static scales"}


@pytest.fixture
def saved(tiny_llama, tmp_path):
    """saved(**changes of the record) -> its path."""

    def save(**changes):
        model = {"path": "there", **identify_checkpoint(tiny_llama()), "fingerprint": FINGERPRINT}
        record = {"schema": SCHEMA, "model": model, "comparison": {"verdict": "PASS"}, **changes}
        path = tmp_path / "r.json"
        path.write_text(json.dumps(record))
        return path

    return save


def test_the_checkpoint_that_was_evaluated_is_served_wherever_it_lies(saved, tiny_llama, tmp_path):
    proof = Proof.read(saved())
    copy = shutil.copytree(tiny_llama(), tmp_path / "elsewhere")
    proof.check_checkpoint(copy)
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(FailedError, match="is of another model: the chat template of"):
        proof.check_checkpoint(copy)
    with pytest.raises(FailedError, match=r"the checkpoint \(config\.json and weights\) of"):
        proof.check_checkpoint(tiny_llama(num_hidden_layers=1))


def test_other_numerics_are_refused_by_name(saved, toy_engine):
    proof = Proof.read(saved())
    proof.check_dtypes(Dtypes("fp32", "fp8", True))
    with pytest.raises(FailedError, match="kv_dtype was fp8, would be fp32"):
        proof.check_dtypes(Dtypes("fp32", "fp32", False))
    info = toy_engine().info
    info.fingerprint.clear()
    info.fingerprint.update(FINGERPRINT)
    proof.check_engine(info)
    info.fingerprint["kernels"] = "other"
    info.fingerprint["more"] = "than was"
    with pytest.raises(FailedError, match="kernels was toy, would be other; more was None, would be than was"):
        proof.check_engine(info)


@pytest.mark.parametrize("verdict", ["FAIL", "NOT ENOUGH ITEMS"])
def test_only_a_pass_is_served(saved, verdict):
    with pytest.raises(FailedError, match=f"its verdict is {verdict}"):
        Proof.read(saved(comparison={"verdict": verdict}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"comparison": None}, "has no verdict"),
        ({"comparison": {"verdict": None}}, "has no verdict"),
        ({"schema": "other"}, "is no result"),
        ({"model": None}, "is no result"),
    ],
)
def test_what_is_no_result_with_a_verdict_is_refused(saved, changes, message):
    with pytest.raises(InputError, match=message):
        Proof.read(saved(**changes))


def test_a_file_that_is_not_there_or_not_json(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        Proof.read(tmp_path / "absent.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        Proof.read(tmp_path / "x.json")
