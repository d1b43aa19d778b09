"""Types of what the fixtures of `conftest.py` hand to tests."""

from collections.abc import Callable
from pathlib import Path

from postroom.adapters.sqlite.read_models import SqliteReadModels

OpenReadModels = Callable[[Path], SqliteReadModels]
"""Open the read models of a store; they are closed when the test is over."""
