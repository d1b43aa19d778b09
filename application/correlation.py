"""Correlation ids: the id of a request, in each log event and message that it causes (svc-mailbox P-8)."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import uuid_utils

MAX_CORR_ID_CHARS: Final = 128
_CORR_ID: Final = re.compile(f"[!-~]{{1,{MAX_CORR_ID_CHARS}}}")
_corr_id: ContextVar[str | None] = ContextVar("postroom_corr_id", default=None)


def current_corr_id() -> str | None:
    """Return the correlation id of the call or message that is being processed; None outside of any."""
    return _corr_id.get()


def is_corr_id(text: str) -> bool:
    """Return whether a text may be a correlation id: 1 to 128 visible ASCII characters."""
    return _CORR_ID.fullmatch(text) is not None


@contextmanager
def correlate(corr_id: str | None = None) -> Iterator[str]:
    """Process one call or message under a correlation id, for as long as the context lasts.

    Arguments:
        corr_id: the caller's; without one, or one that is no correlation id, a UUIDv7 is generated.

    Yields: the correlation id in force (svc-mailbox P-8).
    """
    if corr_id is None or not is_corr_id(corr_id):
        corr_id = str(uuid_utils.uuid7())
    token = _corr_id.set(corr_id)
    try:
        yield corr_id
    finally:
        _corr_id.reset(token)
