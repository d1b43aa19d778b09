"""PostgreSQL URLs and the schema that they name, in a separate module that does not import the driver."""

import re
from functools import lru_cache
from urllib.parse import unquote

from postroom.adapters.sql.statements import check_schema
from postroom.domain.errors import InvalidRequest

SCHEMES = ("postgresql://", "postgres://")
DEFAULT_SCHEMA = "postroom"
"""The schema of a store whose URL names none, under which all SQL knows it; see `in_schema`."""
_PARAMETER = re.compile(r"[?&]schema=([^&]*)")
_NAMES = re.compile(
    r"""(?P<quoted>"[^"\n]*")|\bpostroom(_keys)?(?=[.;])|(?<=')(?P<text>postroom(_keys)?)(?=[ '])"""
)
"""Quoted identifiers, which are of users; the schema as a qualifier; the schema in a text."""


def is_url(store: str) -> bool:
    """Return whether the address of a store is a PostgreSQL URL."""
    return store.startswith(SCHEMES)


@lru_cache(maxsize=256)
def schema_of(url: str) -> str | None:
    """Return the schema that a URL names by `?schema=NAME`, or None: each set of tables has a default.

    Raises: InvalidRequest for more than one name, or one that a schema of a store may not have.
    """
    names = _PARAMETER.findall(url)
    if len(names) > 1:
        raise InvalidRequest("The PostgreSQL URL names more than one schema; give the parameter schema once.")
    return check_schema(unquote(names[0])) if names else None


def without_schema(url: str) -> str:
    """Return a URL as PostgreSQL's own clients read it."""
    before, parameter, after = (
        re.split(r"([?&]schema=[^&]*)", url, maxsplit=1) if schema_of(url) else (url, "", "")
    )
    return before + (after if parameter.startswith("&") else after.replace("&", "?", 1))


@lru_cache(maxsize=256)
def in_schema(schema: str | None, statement: str) -> str:
    """Return a statement of the store that is in a schema.

    Arguments:
        schema: of `schema_of`; None leaves the statement as it is.
        statement: a statement of the default schemas. They qualify the names of tables and functions, and
            begin the names of advisory locks, which differ between the stores of a database. Values are
            parameters: text in the statement would be changed too.
    """
    if schema is None:
        return statement
    return _NAMES.sub(
        lambda match: match["quoted"] or (schema if match["text"] else f'"{schema}"'), statement
    )
