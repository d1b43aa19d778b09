"""A mailbox whose store fails when a test says so."""

from collections.abc import Callable, Sequence
from typing import Any

from postroom.application.messages import Sent
from postroom.domain.errors import Rejected


class TroubledStore:
    """Stand before a mailbox, and fail as a store would."""

    def __init__(self, send_envelopes: Any) -> None:
        self._send = send_envelopes
        self.fail: Callable[[Sequence[bytes]], Exception | None] = lambda envelopes: None
        self.refuse: Callable[[bytes], Rejected | None] = lambda envelope: None
        self.calls = 0

    async def __call__(self, envelopes: Sequence[bytes], **options: Any) -> list[Sent | Rejected]:
        self.calls += 1
        error = self.fail(envelopes)
        if error is not None:
            raise error
        refused = {blob: rejection for blob in envelopes if (rejection := self.refuse(blob)) is not None}
        keys = options.pop("sticky_keys")
        sent = [(blob, key) for blob, key in zip(envelopes, keys, strict=True) if blob not in refused]
        options["sticky_keys"] = [key for _, key in sent]
        answers = iter(await self._send([blob for blob, _ in sent], **options))
        return [refused.get(blob) or next(answers) for blob in envelopes]
