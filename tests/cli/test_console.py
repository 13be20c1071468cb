import json
import os
import pty
import re
import subprocess
import sys

from llmq.cli import console


def test_json_is_one_object_on_stdout(capsys):
    console.status("at work")
    console.warn("look out")
    console.print_json({"a": [1, 2], "text": "—"})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"a": [1, 2], "text": "—"}
    assert captured.err == "at work\nwarning: look out\n"


def test_a_table_in_a_pipe_is_plain_and_unfolded(capsys):
    console.print_table("Title", ["name", ">bytes"], [["x" * 300, "1"], [], ["[bold]as it is[/]", "1,000"]])
    title, header, _, first, _, second = capsys.readouterr().out.splitlines()
    assert title.strip() == "Title"
    assert header.split() == ["name", "bytes"]
    assert first.split() == ["x" * 300, "1"]
    assert second.startswith("[bold]as it is[/]")
    assert second.endswith("1,000")
    assert len(first) == len(second)  # set flush right


def test_progress_in_a_pipe_draws_nothing(capsys):
    with console.progress() as progress:
        progress("working", 1, 2)
    assert capsys.readouterr() == ("", "")


def in_a_terminal(script: str) -> str:
    """What `script` writes to a terminal of 80 columns."""
    own, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", script], stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                chunk = os.read(own, 4096)
            except OSError:  # how Linux says that the other side is closed
                break
            if not chunk:
                break
            written += chunk
    os.close(own)
    assert process.returncode == 0
    return written.decode()


def test_progress_in_a_terminal_shows_stage_amount_and_time_left():
    written = in_a_terminal(
        "import time\n"
        "from llmq.cli import console\n"
        "with console.progress() as progress:\n"
        "    progress('loading [x]', 2**20, 2**21, unit='B')\n"
        "    progress('layers', 1, 30)\n"
        "    time.sleep(0.05)\n"
        "    progress('layers', 10, 30)\n"
        "    time.sleep(0.6)\n"
        "    progress('layers', 30, 30)\n"
    )
    assert "loading [x]" in written
    assert "1.0 MiB of 2.0 MiB" in written
    assert "30 of 30" in written
    assert " left" in written
    assert re.search(r"30 of 30.* in [\d.]+ (ms|s)", written)


def test_durations():
    assert [console.format_duration(s) for s in (0.0123, 4.24, 59.94, 200, 3600 * 2 + 300)] == [
        "12 ms",
        "4.2 s",
        "59.9 s",
        "3 min 20 s",
        "2 h 5 min",
    ]
