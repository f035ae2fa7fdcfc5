"""What the tests of reported bugs share."""

from pathlib import Path

import pytest
from cases_slice import slice_of


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A T4 of which all processes share 1000 MiB."""
    return slice_of(tmp_path)
