"""Settings of the console."""

import re

import msgspec

from postroom.application.masking import Mask
from postroom.domain.arguments import check_int
from postroom.domain.errors import InvalidRequest

DEFAULT_PREFIX = "/console"
_PREFIX = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+\Z")
MINUTE_MS = 60_000
DAY_MS = 24 * 60 * MINUTE_MS
RESERVED = frozenset(("healthz", "metrics", "openapi.json", "readyz", "v1"))
"""First segments of the paths of the HTTP interface."""


class ConsoleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `[console]`; times in ms.

    Arguments:
        prefix: path below which the console is served.
        proxy_prefix: prefix that a reverse proxy strips from request paths.
        read_only: refuse all actions, whatever the caller's capability permits.
        idle_timeout_ms: time without a request after which a session ends.
        max_failed_sign_ins: failed attempts to sign in with one capability from one address in a minute.
        mask_headers: names of headers whose values are hidden from callers without the right `admin`.
        mask_payload_fields: JSON pointers to payload fields that are hidden from them; see `Mask`.
        namespaces: YAML file of namespaces (see docs/namespaces.md) whose schemas decode payloads.
    """

    prefix: str = DEFAULT_PREFIX
    proxy_prefix: str = ""
    read_only: bool = False
    idle_timeout_ms: int = 30 * MINUTE_MS
    max_failed_sign_ins: int = 10
    mask_headers: tuple[str, ...] = ()
    mask_payload_fields: tuple[str, ...] = ()
    namespaces: str | None = None

    def validate(self) -> "ConsoleSettings":
        """Return the settings, or raise InvalidRequest."""
        for name, value in (("prefix", self.prefix), ("proxy_prefix", self.proxy_prefix)):
            if not is_prefix(value) and (value or name == "prefix"):
                raise InvalidRequest(
                    f"[console]: {name} is {value!r}; expected a path such as /console, not ending in /."
                )
        if self.prefix.split("/")[1] in RESERVED:
            raise InvalidRequest(
                f"[console]: prefix {self.prefix} is reserved for the HTTP interface; choose another."
            )
        check_int("[console]: idle_timeout_ms", self.idle_timeout_ms, MINUTE_MS, DAY_MS)
        check_int("[console]: max_failed_sign_ins", self.max_failed_sign_ins, 1, 1_000_000)
        self.mask()
        return self

    def mask(self) -> Mask:
        """Return the mask for callers without the right `admin`, or raise InvalidRequest."""
        return Mask(self.mask_headers, self.mask_payload_fields).validate()


def is_prefix(text: str) -> bool:
    """Return whether a text is a valid prefix of links."""
    return len(text) <= 255 and _PREFIX.match(text) is not None
