import pytest
from playwright.sync_api import Browser

from tests.support.browser import PHONE, Window, find_violations, overflow

HOSTILE = """<!doctype html><html lang="en"><title>Page</title><main><h1>Page</h1>
<div style="width: 500px; height: 1px"></div>
<p style="color: #aaa; background: #fff">Text that is too pale to be read</p>
<script>fetch("http://other.example/"); alert("hostile"); missing()</script></main></html>"""


def test_a_window_records_what_its_pages_must_not_do(browser: Browser) -> None:
    window = Window(browser, PHONE)
    window.page.set_content(HOSTILE)
    window.wait_until(lambda: len(window.errors) == 3)

    assert window.dialogs == ["hostile"]
    assert window.hosts == {"other.example"}
    assert any("missing is not defined" in error for error in window.errors)
    assert any("Failed to fetch" in error for error in window.errors)
    assert any("ERR_NAME_NOT_RESOLVED" in error for error in window.errors)
    with pytest.raises(AssertionError):
        window.assert_quiet("other.example")
    assert overflow(window.page) > 100
    (violation,) = find_violations(window.page)
    assert violation.startswith("color-contrast: p: ")
    window.close()
