"""`make release`: what it refuses, what it cuts, and that a commit is built alike twice."""

from pathlib import Path

import pytest

from scripts import release
from scripts.release import Refusal, build_twice, check_changelog, check_tree, cut, read_section, read_version
from tests.packaging.conftest import ROOT

CHANGELOG = """# Changelog

## [Unreleased]

### Added

- A thing.

## [0.1.0] - 2026-11-29

### Added

- The first thing.
"""
IDENTITY = {
    f"GIT_{role}_{part}": value
    for role in ("AUTHOR", "COMMITTER")
    for part, value in (("NAME", "release"), ("EMAIL", "release@localhost"))
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a version, a changelog and one commit on the branch main."""
    for name, value in IDENTITY.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "thing"\nversion = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commit(tmp_path)
    return tmp_path


def git(project: Path, *arguments: str) -> str:
    return release.git(project, *arguments)


def commit(project: Path) -> None:
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", "A change")


def test_a_cut_gives_the_unreleased_changes_a_version_and_a_date(project: Path) -> None:
    cut(project, "0.2.0", "2026-11-30")
    assert read_version(project) == "0.2.0"
    assert read_section(project, "Unreleased") == (None, "\n")
    assert read_section(project, "0.2.0") == ("2026-11-30", "\n### Added\n\n- A thing.\n\n")
    assert read_section(project, "0.1.0")[1] == "\n### Added\n\n- The first thing.\n"
    check_changelog(project, "0.2.0")


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        ("0.1.0", "The version 0.1.0 is not above 0.1.0"),
        ("0.0.9", "not above 0.1.0"),
        ("0.2", None),
        ("v0.2.0", "v0.2.0 is not a version, such as 0.3.0"),
        ("next", "next is not a version"),
    ],
)
def test_a_cut_refuses_what_is_no_next_version(project: Path, version: str, sentence: str | None) -> None:
    if sentence is None:
        cut(project, version, "2026-11-30")
        return
    with pytest.raises(Refusal, match=sentence):
        cut(project, version, "2026-11-30")
    assert git(project, "status", "--porcelain") == ""


def test_a_cut_refuses_a_changelog_without_unreleased_entries(project: Path) -> None:
    (project / "CHANGELOG.md").write_text(CHANGELOG.replace("- A thing.\n", ""))
    with pytest.raises(Refusal, match=r"no entries below \[Unreleased\]; list there what users notice"):
        cut(project, "0.2.0", "2026-11-30")


def test_a_release_refuses_a_dirty_tree_and_another_branch(project: Path) -> None:
    check_tree(project, "0.1.0")
    (project / "notes.txt").write_text("draft")
    with pytest.raises(Refusal, match=r"not committed \(notes\.txt\); commit or stash them"):
        check_tree(project, "0.1.0")
    commit(project)
    git(project, "switch", "--quiet", "--create", "topic")
    with pytest.raises(Refusal, match="The branch is topic, and releases are built on main"):
        check_tree(project, "0.1.0")


def test_a_workflow_may_build_the_commit_of_a_tag_and_a_version_has_one_commit(project: Path) -> None:
    git(project, "tag", "--annotate", "v0.1.0", "--message", "0.1.0")
    git(project, "switch", "--quiet", "--detach")
    check_tree(project, "0.1.0")
    with pytest.raises(Refusal, match="The branch is HEAD"):
        check_tree(project, None)
    (project / "more.txt").write_text("more")
    commit(project)
    with pytest.raises(Refusal, match=r"The tag v0\.1\.0 is of the commit [0-9a-f]{12}, not of this one"):
        check_tree(project, "0.1.0")


def test_a_release_refuses_changes_without_a_version_and_a_version_without_changes(project: Path) -> None:
    with pytest.raises(Refusal, match=r"entries below \[Unreleased\] that 0\.1\.0 does not have"):
        check_changelog(project, "0.1.0")
    (project / "CHANGELOG.md").write_text(
        CHANGELOG.replace("- A thing.\n", "").replace("0.1.0] - ", "0.0.9] - ")
    )
    with pytest.raises(Refusal, match=r"no section `## \[0\.1\.0\] - DATE` with entries"):
        check_changelog(project, "0.1.0")


def test_the_version_of_this_repository_has_a_dated_section_of_the_changelog() -> None:
    date, text = read_section(ROOT, read_version(ROOT))
    assert date is not None
    assert "\n- " in text


@pytest.mark.extended
def test_a_commit_is_built_alike_twice(tmp_path: Path) -> None:
    built = build_twice(ROOT, tmp_path)
    version = read_version(ROOT)
    assert [file.name for file in built] == [
        f"postroom-{version}-py3-none-any.whl",
        f"postroom-{version}.tar.gz",
    ]
