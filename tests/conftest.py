from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of data and of other libraries' checkpoints beside the repository; not part of it."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("no ../shared beside the repository: its data and checkpoints are not part of it")
    return folder
