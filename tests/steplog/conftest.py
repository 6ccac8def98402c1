import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has an empty folder and no settings."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("STEPLOG_")]:
        monkeypatch.delenv(name)
    return tmp_path
