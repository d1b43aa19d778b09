"""Runners that registered with an admin, and what it offers to them."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from postroom.application.cluster.runner import MAX_OFFERS, RegisteredRunner, Runners
from postroom.domain.message import MS

TTL_MS, OFFER_MS = 3_000, 6_000
NAMES = ("r-1", "r-2", "r-3")


def register(runners: Runners, name: str, now: int, mailboxes: Sequence[str] = (), proxy: str = "p") -> None:
    runners.register(RegisteredRunner(name, proxy, "h:1", frozenset(mailboxes), now))


def test_the_runner_with_the_fewest_mailboxes_is_offered_one_first() -> None:
    runners = Runners(TTL_MS, OFFER_MS)
    register(runners, "r-1", 0, ["a@p", "b@p"])
    register(runners, "r-2", 0, ["c@p"])
    orphans: dict[str, str | None] = {"d@p": "p"}
    assert runners.offer("r-1", orphans, 0) == []
    assert runners.offer("r-2", orphans, 0) == ["d@p"]


def test_an_offer_that_is_not_accepted_goes_to_the_next_runner_and_comes_round_again() -> None:
    runners = Runners(TTL_MS, OFFER_MS)
    orphans: dict[str, str | None] = {"d@p": "p"}
    offers = []
    for turn in range(4):
        now = turn * (OFFER_MS + 1) * MS
        for name in NAMES:
            register(runners, name, now)
        offers.append([name for name in NAMES if runners.offer(name, orphans, now)])
    assert offers == [["r-1"], ["r-2"], ["r-3"], ["r-1"]]


def test_many_mailboxes_are_offered_over_several_answers() -> None:
    runners = Runners(TTL_MS, OFFER_MS)
    register(runners, "r-1", 0)
    orphans: dict[str, str | None] = {f"{n}@p": "p" for n in range(250)}
    offers: set[str] = set()
    for _ in range(3):
        answer = runners.offer("r-1", orphans, 0)
        assert len(answer) <= MAX_OFFERS
        offers |= {*answer}
        orphans = {name: proxy for name, proxy in orphans.items() if name not in offers}
    assert len(offers) == 250


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, OFFER_MS * MS)), max_size=30))
def test_no_mailbox_is_offered_to_two_live_runners_at_once(calls: list[tuple[str, int]]) -> None:
    runners = Runners(TTL_MS, OFFER_MS)
    orphans: dict[str, str | None] = {f"{n}@p": "p" for n in range(5)}
    now = 0
    holders: dict[str, tuple[str, int]] = {}
    silent: set[str] = set()
    """Mailboxes whose holder was silent for too long, so that its offer may have been made to another."""
    for name, pause in calls:
        now += pause
        alive = {each.runner for each in runners.alive(now)}
        silent |= {mailbox for mailbox, (holder, _) in holders.items() if holder not in alive}
        register(runners, name, now)
        for mailbox in runners.offer(name, orphans, now):
            holder, until = holders.get(mailbox, (name, 0))
            assert holder == name or until <= now or mailbox in silent
            if holder != name or until <= now:
                holders[mailbox] = (name, now + OFFER_MS * MS)
                silent.discard(mailbox)
