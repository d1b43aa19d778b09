"""Types of what the fixtures of `conftest.py` hand to tests."""

from collections.abc import Callable
from pathlib import Path

from postroom.application.ports.read_models import ReadModels

OpenReadModels = Callable[[Path | str], ReadModels]
"""Open the read models of a store; they are closed when the test is over."""
