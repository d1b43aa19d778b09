"""A fast path through nats-py for the messages of some subscriptions.

For every message, nats-py parses all headers, builds a `Msg`, and queues it for a reader with a timeout,
which is too slow for a pull consumer of 20,000 messages a second. This parser splits the bytes from the
socket into protocol messages, delivers those of its subscriptions as bytes, and passes others to nats-py,
which remains responsible for connections, authentication, TLS and other subscriptions.
"""

from collections.abc import Callable

from nats.aio.client import Client
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

Deliver = Callable[[bytes, bytes | None, bytes, bytes], None]
"""Callback with subject, reply subject, raw headers and data of one message."""
Wake = Callable[[], None]
"""Callback after all messages of one read are delivered."""

_LINE_END = b"\r\n"
_ENDS = len(_LINE_END)


class FastPathParser(Parser):
    """Parser of the NATS protocol that delivers the messages of some subscriptions itself."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._subscriptions: dict[bytes, tuple[Deliver, Wake | None]] = {}

    def add(self, subscription: int, deliver: Deliver, wake: Wake | None = None) -> None:
        """Deliver the messages of a subscription from now on.

        Arguments:
            subscription: its id.
        """
        self._subscriptions[b"%d" % subscription] = (deliver, wake)

    def reset(self) -> None:
        """Drop unparsed bytes; called by nats-py when a connection ends."""
        super().reset()
        self._unread = bytearray()
        self._needed = 0

    async def parse(self, data: bytes = b"") -> None:
        """Parse bytes from the socket; an incomplete message is buffered."""
        self.nc._pings_outstanding = 0  # any data shows that the server is alive
        unread = self._unread
        unread += data
        if len(unread) < self._needed:
            return
        read, self._needed = bytes(unread), 0
        at = 0
        wakes: set[Wake | None] = set()
        while (line_end := read.find(_LINE_END, at)) >= 0:
            words = read[at:line_end].split()
            body = stop = line_end + _ENDS
            ours = None
            try:
                if words[0] in (b"MSG", b"HMSG"):
                    ours = self._subscriptions.get(words[2])
                    stop = body + int(words[-1]) + _ENDS
            except (IndexError, ValueError):
                raise ProtocolError(f"nats: malformed line {read[at:line_end]!r}") from None
            if len(read) < stop:
                self._needed = stop - at
                break
            if ours is not None:
                deliver, wake = ours
                # MSG subject sid [reply] size, and HMSG subject sid [reply] header-size size
                has_headers = words[0] == b"HMSG"
                data_at = body + int(words[-2]) if has_headers else body
                reply = words[3] if len(words) == (6 if has_headers else 5) else None
                deliver(words[1], reply, read[body:data_at], read[data_at : stop - _ENDS])
                wakes.add(wake)
            else:
                await super().parse(read[at:stop])
                if self._unread is not unread:  # the connection ended meanwhile
                    break
            at = stop
        del unread[:at]
        for wake in wakes:
            if wake is not None:
                wake()
