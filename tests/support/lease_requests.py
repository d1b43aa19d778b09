"""Requests for leases."""

from postroom.application.ports.control_plane import LeaseRequest

ACQUISITION = "0192d1f0-7c1a-7000-8000-{:012x}"


def lease_request(
    mailbox: str = "orders@proxy-1",
    runner: str = "runner-1",
    *,
    attempt: int = 1,
    proxy: str = "proxy-1",
    address: str = "127.0.0.1:7001",
    log_epoch: int = 0,
    ttl_ms: int | None = None,
) -> LeaseRequest:
    """Return a request for a lease.

    Arguments:
        attempt: number of the acquisition; the same number repeats it.
    """
    return LeaseRequest(
        mailbox=mailbox,
        runner=runner,
        proxy=proxy,
        address=address,
        acquisition=ACQUISITION.format(attempt),
        log_epoch=log_epoch,
        ttl_ms=ttl_ms,
    )
