"""The site and the commands of docs/django.md do what the page shows."""

from tests.e2e.conftest import ROOT, Postroom
from tests.support.console import Session, read_files, read_steps
from tests.support.django_site import BACKPORT

PAGE = ROOT / "docs" / "django.md"
MANAGE = """\
import os
import sys

from django.core.management import execute_from_command_line

os.environ["DJANGO_SETTINGS_MODULE"] = "mysite.settings"
execute_from_command_line(sys.argv)
"""


def test_the_page_shows_what_happens(postroom: Postroom) -> None:
    text = PAGE.read_text("utf-8")
    if not BACKPORT:
        text = text.replace('"django_tasks", ', "").replace("from django_tasks", "from django.tasks")
    for name, content in {**read_files(text), "manage.py": MANAGE, "shop/__init__.py": ""}.items():
        path = postroom.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    session = Session(postroom.shell)
    steps = list(read_steps(text))
    for step in steps:
        session(step)
    assert len(steps) == 4
