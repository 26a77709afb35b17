"""What tests of the real host share: a fake driver in place of NVIDIA's."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import FakeNvml, Profile
from tests.host.nvml_rig import Driver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    def make(*profiles: Profile, **options: Any) -> FakeNvml:
        fake = FakeNvml.create(tmp_path, list(profiles), **options)
        for name, value in fake.env.items():
            monkeypatch.setenv(name, value)
        return fake

    return make
