"""README and project URLs of the package, with the addresses that are known where it is built.

POSTROOM_SITE_URL and POSTROOM_REPOSITORY_URL are those of the site and of the repository. A package index
shows the README without the files that its links lead to; with neither address they stay relative.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = {"CHANGELOG.md": "changelog/", "SECURITY.md": "vulnerabilities/"}
"""Files outside docs/ that are pages of the site."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


class CustomMetadataHook(MetadataHookInterface):
    """Sets the README and the URLs, for hatchling."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the fields to the metadata of the project."""
        root, version = Path(self.root), metadata["version"]
        site, repository = (
            os.environ.get(f"POSTROOM_{name}_URL", "").rstrip("/") for name in ("SITE", "REPOSITORY")
        )

        def resolve(link: re.Match[str]) -> str:
            mark, label, path, anchor = link[1], link[2], link[3], link[4] or ""
            page = find_page(root, path) if site else None
            if page is not None:
                target = f"{site}/{version}/{page}"
            elif repository:
                kind = "raw" if mark else "tree" if (root / path).is_dir() else "blob"
                target = f"{repository}/{kind}/v{version}/{path}"
            else:
                return link[0]
            return f"{mark}[{label}]({target}{anchor})"

        text = _LINK.sub(resolve, (root / "README.md").read_text("utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {
            **({"Documentation": f"{site}/{version}/"} if site else {}),
            **({"Changelog": f"{site}/{version}/changelog/"} if site else {}),
            **({"Source": repository, "Issues": f"{repository}/issues"} if repository else {}),
        }


def find_page(root: Path, path: str) -> str | None:
    """Return the path on the site of a file of the repository, or None."""
    if path in PAGES or not path.startswith("docs/"):
        return PAGES.get(path)
    name = path.removeprefix("docs/")
    if (root / path).is_dir():
        return f"{name.rstrip('/')}/"
    if not name.endswith(".md"):
        return name
    return re.sub(r"(^|/)(index|README)/$", r"\1", f"{name.removesuffix('.md')}/")
