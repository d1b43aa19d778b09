"""The list of versions of the site, which its pages offer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def list_version(site: Path, version: str, *, is_latest: bool) -> None:
    """Add a version to versions.json, and lead the address of the site to the latest one."""
    file = site / "versions.json"
    versions: list[Mapping[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    others = [each for each in versions if each["version"] != version]
    if is_latest:
        others = [{**each, "aliases": []} for each in others]
    was_latest = any("latest" in each["aliases"] for each in versions if each["version"] == version)
    aliases = ["latest"] if is_latest or was_latest else []
    versions = sorted(
        [*others, {"version": version, "title": version, "aliases": aliases}], key=_newest_first
    )
    file.write_text(json.dumps(versions, indent=1) + "\n")
    first = next((each for each in versions if each["aliases"]), versions[0])["version"]
    (site / "index.html").write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Postroom</title>'
        f'<meta http-equiv="refresh" content="0; url={first}/"><a href="{first}/">Documentation</a></html>\n'
    )


def _newest_first(version: Mapping[str, Any]) -> list[tuple[int, int]]:
    parts = str(version["version"]).lstrip("v").split(".")
    return [(0, -int(part)) if part.isdecimal() else (1, 0) for part in parts]
