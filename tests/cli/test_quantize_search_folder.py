"""What is kept of a checkpoint that a search made and did not choose."""

from llmq.cli.quantize_search import _keep_report_only
from llmq.quantize.report import REPORT_FILE
from llmq.runtime.packed_cache import FOLDER


def test_only_the_report_stays_of_a_checkpoint_that_an_engine_has_loaded(tmp_path):
    for name in (REPORT_FILE, "config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "packed-0123456789ab.bin").write_bytes(b"x")
    _keep_report_only(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [REPORT_FILE]
