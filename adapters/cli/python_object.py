"""Objects of the user's own modules, named `MODULE:NAME` on the command line."""

import sys
from importlib import import_module
from typing import TypeVar

from postroom.adapters.cli.values import WrongUsage
from postroom.application.telemetry import summarize

T = TypeVar("T")


def load_object(text: str, kind: type[T]) -> T:
    """Import an object by `module:name`; the working directory comes first, as with `python -m`.

    Raises: WrongUsage when it can't be imported or is of another type.
    """
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise WrongUsage(
            f"{text!r} does not name an object of type {kind.__name__}; write MODULE:NAME, such as "
            "shop.tasks:worker."
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        value = import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise WrongUsage(f"{text} can't be imported: {summarize(error).rstrip('.')}.") from error
    if not isinstance(value, kind):
        raise WrongUsage(f"{text} is of type {type(value).__name__}, not {kind.__name__}.")
    return value
