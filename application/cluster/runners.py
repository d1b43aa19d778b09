"""The runners that registered with an admin, and the mailboxes that it offers to them."""

from collections.abc import Iterable, Mapping

import msgspec

MAX_RUNNERS = 10_000
MAX_OFFERS = 100
"""Mailboxes that are offered in one answer; the next answers offer the others."""


class RegisteredRunner(msgspec.Struct):
    """A runner that is alive.

    Arguments:
        mailboxes: of which it said that it has the lease.
        seen_at: uptime in µs at which it registered last.
    """

    runner: str
    proxy: str
    address: str
    mailboxes: frozenset[str]
    seen_at: int


class _Offer(msgspec.Struct):
    runner: str
    until: int
    declined: set[str]
    is_made: bool = False


class Runners:
    """Soft state of an admin: runners register again with another one.

    Arguments:
        ttl_ms: after which a runner counts as gone.
        offer_ms: how long a mailbox that was offered to one runner is offered to no other.
    """

    def __init__(self, ttl_ms: int, offer_ms: int) -> None:
        self._ttl_us = ttl_ms * 1_000
        self._offer_us = offer_ms * 1_000
        self._runners: dict[str, RegisteredRunner] = {}
        self._offers: dict[str, _Offer] = {}

    def register(self, runner: RegisteredRunner) -> bool:
        """Note that a runner is alive; return False if there are too many of them."""
        if runner.runner not in self._runners and len(self._runners) >= MAX_RUNNERS:
            self.alive(runner.seen_at)
            if len(self._runners) >= MAX_RUNNERS:
                return False
        self._runners[runner.runner] = runner
        return True

    def leave(self, runner: str) -> None:
        """Forget a runner that shuts down."""
        self._runners.pop(runner, None)

    def alive(self, now: int) -> list[RegisteredRunner]:
        """Return the runners that are alive by id, and forget the others; `now` is uptime in µs."""
        for each in [each for each in self._runners.values() if now - each.seen_at > self._ttl_us]:
            del self._runners[each.runner]
        return sorted(self._runners.values(), key=lambda each: each.runner)

    def offer(self, runner: str, orphans: Mapping[str, str | None], now: int) -> list[str]:
        """Return the mailboxes to offer to a runner, each to one runner at a time.

        A mailbox goes to the runner of its proxy that has the fewest. While its proxy has no live runner, any
        other runner is offered it, as a mailbox of no owner delivers nothing.

        Arguments:
            orphans: the mailboxes without a lease, with the proxy that each belongs to.
            now: uptime in µs.
        """
        alive = self.alive(now)
        for mailbox in [mailbox for mailbox in self._offers if mailbox not in orphans]:
            del self._offers[mailbox]
        loads = {each.runner: len(each.mailboxes) for each in alive}
        for offer in self._offers.values():
            if offer.runner in loads and offer.until > now:
                loads[offer.runner] += 1
        offers: list[str] = []
        for mailbox, proxy in sorted(orphans.items()):
            if len(offers) == MAX_OFFERS:
                break
            if self._choose(mailbox, proxy, alive, loads, now) == runner:
                offer = self._offers[mailbox]
                if not offer.is_made:  # it counts from when the runner learns of it
                    offer.is_made, offer.until = True, now + self._offer_us
                offers.append(mailbox)
        return offers

    def _choose(
        self,
        mailbox: str,
        proxy: str | None,
        alive: Iterable[RegisteredRunner],
        loads: dict[str, int],
        now: int,
    ) -> str | None:
        """Return the runner that a mailbox is offered to now."""
        offer = self._offers.get(mailbox)
        if offer is not None and offer.until > now and offer.runner in loads:
            return offer.runner
        candidates = {each.runner for each in alive if each.proxy == proxy} or {*loads}
        declined = set() if offer is None else offer.declined | {offer.runner}
        if not candidates - declined:
            declined = set()
        choice = min(candidates - declined, key=lambda each: (loads[each], each), default=None)
        if choice is not None:
            loads[choice] += 1
            self._offers[mailbox] = _Offer(choice, now + self._offer_us, declined)
        return choice
