"""Descriptors that a forked process does not inherit, so that it keeps neither locks nor sockets open."""

import os

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
