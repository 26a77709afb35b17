"""What all tests share: hypothesis is deterministic here, and data has one way in."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("gpuagent", deadline=None, derandomize=True)
settings.load_profile("gpuagent")


@pytest.fixture(scope="session")
def data() -> Path:
    """Folder of captures and traces; tests that read it skip where it is not at hand."""
    folder = os.environ.get("GPUAGENT_DATA", "")
    if not folder:
        pytest.skip("GPUAGENT_DATA is not set: the captures and traces are not at hand")
    return Path(folder)
