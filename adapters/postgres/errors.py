"""URLs of databases in messages, and errors about databases."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from postroom.adapters.postgres.url import is_url, schema_of, without_schema
from postroom.domain.errors import InvalidRequest, Unavailable, UnusableServer

_NO_CONNECTION = ("08", "28", "3D", "53300", "57P")
"""Prefixes of the SQLSTATE of connections that failed, were refused, or were ended by the server."""
_REFUSED = ("28", "3D")
_REFUSAL_TEXTS = ("authentication failed", "no pg_hba.conf entry", "does not exist", "permission denied")
_LOCAL_HOSTS = ("", "localhost", "127.0.0.1", "::1")


def shown(url: str) -> str:
    """Return the URL for messages: without the password, and without options except the schema.

    Raises: InvalidRequest for a malformed URL.
    """
    parameters = parameters_of(url)
    user = f"{parameters['user']}@" if "user" in parameters else ""
    port = f":{parameters['port']}" if "port" in parameters else ""
    schema = f"?schema={schema_of(url)}" if schema_of(url) else ""
    return f"postgresql://{user}{parameters.get('host', '')}{port}/{parameters.get('dbname', '')}{schema}"


def identity(url: str) -> str:
    """Return server, database and schema of a URL, the same for all spellings of this host."""
    parameters = parameters_of(url)
    hosts = str(parameters.get("host") or os.environ.get("PGHOST", "")).split(",")
    is_local = all(host in _LOCAL_HOSTS or host.startswith("/") for host in hosts)
    port = parameters.get("port") or os.environ.get("PGPORT") or 5_432
    user = parameters.get("user") or os.environ.get("PGUSER", "")
    database = parameters.get("dbname") or os.environ.get("PGDATABASE") or user
    schema = f" {schema_of(url)}" if schema_of(url) else ""
    return f"postgresql {'local' if is_local else ','.join(hosts)} {port} {database}{schema}"


@contextmanager
def unavailable(url: str) -> Iterator[None]:
    """Raise `Unavailable`, without the password, in place of a database error."""
    try:
        yield
    except psycopg.Error as error:
        raise describe(error, url) from error


def describe(error: psycopg.Error, url: str) -> Unavailable:
    """Return a database error as `Unavailable`, in one sentence."""
    message = error.diag.message_primary or str(error).partition("\n")[0]
    reason = " ".join(message.removeprefix("connection failed:").split()).rstrip(".") or type(error).__name__
    if _is_refused(error, message):
        return UnusableServer(
            f"The database {shown(url)} refuses the connection: {reason}. Check user, password and "
            "database of its URL."
        )
    if is_lost(error):
        return Unavailable(
            f"The database {shown(url)} can't be reached: {reason}. Check its URL and that the server runs."
        )
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return UnusableServer(
            f"The database {shown(url)} denies a privilege that Postroom needs: {reason}; grant it to the "
            "user."
        )
    if error.sqlstate is None:
        return Unavailable(f"A statement can't be sent to the database {shown(url)}: {reason}.")
    return Unavailable(f"The database {shown(url)} refused a statement: {reason}.")


def is_lost(error: psycopg.Error) -> bool:
    """Return whether an error means that a connection to the server could not be made, or was lost."""
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError)
    return error.sqlstate.startswith(_NO_CONNECTION)


def _is_refused(error: psycopg.Error, message: str) -> bool:
    """Return whether a server refused the user or the database of a connection, so that a retry fails, too.

    libpq reports no SQLSTATE for these errors; the texts are English, as most servers send them.
    """
    if error.sqlstate is not None:
        return error.sqlstate.startswith(_REFUSED)
    return "FATAL:" in message and any(text in message for text in _REFUSAL_TEXTS)


def silent(url: str, seconds: float) -> Unavailable:
    """Return the error about a database that does not answer."""
    return Unavailable(f"The database {shown(url)} did not answer within {seconds:g} s; check the server.")


def pooler_refusal(url: str, session_for: str) -> InvalidRequest:
    """Return the error about a pooler where a feature needs a session of its own."""
    return InvalidRequest(
        f"{shown(url)} is a transaction pooler; name the server itself, as {session_for} needs a session of "
        "its own."
    )


def parameters_of(url: str) -> dict[str, Any]:
    """Return the parameters of libpq in a URL; raise InvalidRequest for a malformed one."""
    parameters: dict[str, Any] = {}
    with suppress(psycopg.Error):  # its message may contain part of the password
        parameters = conninfo_to_dict(without_schema(url))
    ports = str(parameters.get("port", "0")).replace(",", "")
    # An unescaped @ or / in the password ends it early, and the rest is parsed as host and database.
    is_ambiguous = (
        "@" in f"{parameters.get('host', '')}{parameters.get('dbname', '')}" or not ports.isdecimal()
    )
    if not parameters or is_ambiguous or not is_url(url):
        raise InvalidRequest(
            "The PostgreSQL URL is malformed; write postgresql://user:password@host:port/database, with "
            "special characters of the password as %XX."
        )
    return parameters
