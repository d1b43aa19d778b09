"""Descriptors that a forked process does not inherit, so that it keeps neither locks nor sockets open."""

import os

from postroom.domain.errors import InvalidRequest

_descriptors: dict[int, os.stat_result] = {}


def set_close_on_fork(descriptor: int, is_closed: bool) -> None:
    """Set whether forked processes lose a descriptor; unset it before it is closed.

    Other than close-on-exec, this is about processes that go on with the same program, such as those of
    `multiprocessing` and of web servers.
    """
    if is_closed:
        _descriptors[descriptor] = os.fstat(descriptor)
    else:
        _descriptors.pop(descriptor, None)


def check_not_forked(process: int, mailbox: str) -> None:
    """Check that this is the process that opened a mailbox.

    Arguments:
        process: its id.

    Raises: InvalidRequest in a process that was forked from it.
    """
    if os.getpid() != process:
        raise InvalidRequest(
            f"Mailbox {mailbox} was opened before this process was forked, and does not work here; connect "
            "after the fork."
        )


def _close_in_child() -> None:
    """Put /dev/null in place of the descriptors: the objects that contain them still close the numbers."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor, status in _descriptors.items():
        try:
            if os.path.samestat(os.fstat(descriptor), status):  # a library may have closed it by itself
                os.dup2(null, descriptor, inheritable=False)
        except OSError:
            continue
    os.close(null)
    _descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
