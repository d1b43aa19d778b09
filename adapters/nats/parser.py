"""A short way through nats-py for the messages of one subscription.

Most of what nats-py does per message is of no use to a pull consumer that takes 20,000 of them a second: it
parses all headers, builds a `Msg`, and queues it for somebody who takes it out under a timeout of its own.
This parser cuts what was read from the socket into protocol messages, hands those of one subscription over as
they stand, and leaves all else to nats-py: connecting, authentication, TLS, reconnects, other subscriptions.
"""

from collections.abc import Callable

from nats.aio.client import Client
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

Deliver = Callable[[bytes, bytes | None, bytes, bytes], None]
"""Take subject, reply subject, raw headers and data of one message."""

_LINE_END = b"\r\n"
_ENDS = len(_LINE_END)


class ShortCutParser(Parser):
    """Parse what a server sends.

    Arguments:
        subscription: the number of the subscription whose messages take the short way.
        deliver: is called with each of them.
        wake: is called when all of them that were read together have been delivered.
    """

    def __init__(self, client: Client, subscription: int, deliver: Deliver, wake: Callable[[], None]) -> None:
        super().__init__(client)
        self._subscription = str(subscription).encode()
        self._deliver = deliver
        self._wake = wake

    def reset(self) -> None:
        """Forget what was read; nats-py calls this when a connection ends."""
        super().reset()
        self._unread = bytearray()
        self._needed = 0

    async def parse(self, data: bytes = b"") -> None:
        """Parse what was read from the socket; the beginning of a message waits for the rest of it."""
        unread = self._unread
        unread += data
        if len(unread) < self._needed:
            return
        read, self._needed = bytes(unread), 0
        at = delivered = 0
        while (line_end := read.find(_LINE_END, at)) >= 0:
            words = read[at:line_end].split()
            body = stop = line_end + _ENDS
            is_ours = False
            try:
                if words[0] in (b"MSG", b"HMSG"):
                    is_ours = words[2] == self._subscription
                    stop = body + int(words[-1]) + _ENDS
            except (IndexError, ValueError):
                raise ProtocolError(f"nats: malformed line {read[at:line_end]!r}") from None
            if len(read) < stop:
                self._needed = stop - at
                break
            if is_ours:
                # MSG subject sid [reply] size, and HMSG subject sid [reply] header-size size
                has_headers = words[0] == b"HMSG"
                data_at = body + int(words[-2]) if has_headers else body
                reply = words[3] if len(words) == (6 if has_headers else 5) else None
                self._deliver(words[1], reply, read[body:data_at], read[data_at : stop - _ENDS])
                delivered += 1
            else:
                await super().parse(read[at:stop])
                if self._unread is not unread:  # the connection ended meanwhile
                    break
            at = stop
        del unread[:at]
        if delivered:
            self._wake()
