"""What tests of several parts share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny model, made once a session."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    # One thread is the fastest for so small a model.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "scripts.tiny_model", str(directory)], check=True, env=environment)
    return directory
