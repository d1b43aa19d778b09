"""Spark is started with what there is."""

import os
import sys
from pathlib import Path

import pytest

from postroom.domain.errors import Unavailable
from postroom.projections.spark.session import find_java


def test_without_java_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", "restored after the test, as it was before")
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(Unavailable, match=r"Java 17 .* --engine local"):
        find_java()
    (tmp_path / "jdk" / "bin").mkdir(parents=True)
    (tmp_path / "jdk" / "bin" / "java").touch()
    find_java()
    assert os.environ["JAVA_HOME"] == str(tmp_path / "jdk")
