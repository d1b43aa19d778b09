"""What the validation of a payload tells (RFC-037 schema enforcement modes)."""

import msgspec

__all__ = ["ACCEPTED", "PayloadValidation"]


class PayloadValidation(msgspec.Struct, frozen=True):
    """Tell whether a message may be stored as far as its payload goes, and all that is wrong with it.

    Arguments:
        problems: a sentence each, naming topic and place; in mode `warn` they are accepted.
    """

    is_accepted: bool
    problems: tuple[str, ...] = ()


ACCEPTED = PayloadValidation(True)
