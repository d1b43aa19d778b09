"""Result of a payload validation (RFC-037 schema enforcement modes)."""

import msgspec

__all__ = ["ACCEPTED", "PayloadValidation"]


class PayloadValidation(msgspec.Struct, frozen=True):
    """Whether a payload is accepted, and its problems.

    Arguments:
        problems: one sentence each, with topic and location; in mode `warn` they are accepted.
    """

    is_accepted: bool
    problems: tuple[str, ...] = ()


ACCEPTED = PayloadValidation(True)
