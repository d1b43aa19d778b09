"""What operators do, all behind a proxy that serves the console below a path of its own."""

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.console.conftest import Console, enter_token
from tests.support.browser import Window
from tests.support.hostile_store import QUIET_TOPIC
from tests.support.prefix_proxy import PrefixProxy

PREFIX = "/ops"


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """A console behind a proxy that states its prefix, which no request may miss."""
    console = Console(tmp_path_factory.mktemp("console"), behind_proxy=True, allowed_hosts=["127.0.0.1"])
    with console.server as server, PrefixProxy(server.address, PREFIX) as proxy:
        console.base = f"{proxy.origin}{PREFIX}/console"
        yield console
        assert proxy.refused == []


def test_an_action_whose_token_expired_leads_to_sign_in_and_back(
    console: Console, windows: Callable[..., Window]
) -> None:
    window = windows()
    seconds = 4
    while not console.sign_in(window, console.issue("ops", lifetime_ms=seconds * 1_000)):
        seconds *= 4  # the machine was too slow for so short a life
    page = window.page
    page.get_by_text("Reload the page to go on.").wait_for()

    page.get_by_role("button", name=f"Pause {QUIET_TOPIC}").click()
    enter_token(window, console.issue("ops"))
    page.get_by_text(QUIET_TOPIC).wait_for()
    page.get_by_role("button", name="Send again").click()

    page.get_by_role("button", name=f"Resume {QUIET_TOPIC}").click()
    page.get_by_role("button", name=f"Pause {QUIET_TOPIC}").wait_for()


def test_an_operator_sees_what_another_one_does(console: Console, windows: Callable[..., Window]) -> None:
    first, second = windows(), windows()
    for window in (first, second):
        assert console.sign_in(window, console.issue("ops"))

    first.page.get_by_role("button", name=f"Pause {QUIET_TOPIC}").click()
    second.page.get_by_role("button", name=f"Resume {QUIET_TOPIC}").click()
    first.page.get_by_role("button", name=f"Pause {QUIET_TOPIC}").wait_for()

    first.assert_quiet(console.host)
    second.assert_quiet(console.host)
