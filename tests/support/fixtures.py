"""Types of what the fixtures of `conftest.py` hand to tests."""

from collections.abc import Callable
from pathlib import Path

from postroom.application.ports.read_models import ReadModels

CreateDatabase = Callable[[str | None], str]
"""Create a database, empty or a copy of the one at a URL, and return its URL."""

OpenReadModels = Callable[[Path | str], ReadModels]
"""Open the read models of a store; they are closed when the test is over."""
