"""The mailboxes that a process serves at the moment."""

from collections.abc import Callable

from postroom.application.service import Service
from postroom.domain.errors import InvalidRequest, Unavailable, WrongOwner

RETRY_MS = 500


class ServedMailboxes:
    """Services of mailboxes by name; `find` is the `FindService` of a server."""

    def __init__(self) -> None:
        self._services: dict[str, Service] = {}

    def __contains__(self, mailbox: str) -> bool:
        return mailbox in self._services

    @property
    def names(self) -> list[str]:
        """Return the names of the mailboxes, sorted."""
        return sorted(self._services)

    def find(self, mailbox: str | None) -> Service:
        """Return the service of a mailbox, or of the only one when no name is given.

        Raises: WrongOwner when it is not served here, InvalidRequest without a name when several are,
            Unavailable when none is.
        """
        if mailbox is not None:
            service = self._services.get(mailbox)
            if service is None:
                raise WrongOwner(mailbox)
            return service
        if len(self._services) > 1:
            raise InvalidRequest(
                "The server serves several mailboxes; name one in the metadata postroom-mailbox."
            )
        for service in self._services.values():
            return service
        raise Unavailable("The server serves no mailbox now; retry shortly.", RETRY_MS)

    def add(self, service: Service) -> Callable[[], None]:
        """Serve a mailbox; return the function that stops it, with its streams and long polls."""
        name = service.mailbox.name
        self._services[name] = service

        def remove() -> None:
            if self._services.get(name) is service:
                del self._services[name]
            service.stopping.set()

        return remove
