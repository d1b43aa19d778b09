"""Options of nats-py for TLS and authentication."""

import ssl
from importlib import import_module
from pathlib import Path
from typing import Any

from postroom.adapters.nats.settings import NatsSettings
from postroom.application.extras import explain_missing_extra
from postroom.domain.errors import InvalidRequest

_REFUSALS = ("authorization", "authentication", "credentials")
"""Texts in the errors with which a server refuses a user, token, certificate or signature."""


def access_options(settings: NatsSettings) -> dict[str, Any]:
    """Return the options of `Client.connect`.

    Password and token are read again for each connection, so that their files may be replaced.

    Raises: InvalidRequest when a file can't be used, MissingExtra without the package `nkeys`, which signs.
    """
    options: dict[str, Any] = {}
    for name, option in (("credentials", "user_credentials"), ("nkey", "nkeys_seed")):
        path = getattr(settings, name)
        if path is not None:
            with explain_missing_extra():
                import_module("nkeys")  # nats-py imports it only when it signs
            _read(name, path)
            options[option] = path
    for name, option in (("password_file", "password"), ("token_file", "token")):
        path = getattr(settings, name)
        if path is not None:
            _read(name, path)
            options[option] = lambda name=name, path=path: _read(name, path)
    if settings.user is not None:
        options["user"] = settings.user
    if settings.needs_tls:
        options |= {"tls": _tls_context(settings), "tls_handshake_first": settings.tls_first}
    return options


def explain(error: BaseException) -> str | None:
    """Return advice for an error that a retry would repeat, or None for other errors."""
    if isinstance(error, InvalidRequest):
        return "Check the NATS settings."
    if isinstance(error, ssl.SSLCertVerificationError):
        return "Check ca of the NATS settings, and the name and expiry of the server's certificate."
    if isinstance(error, ssl.SSLError):
        return "Check certificate and key of the NATS settings, and that the server has TLS."
    text = str(error).lower()
    if any(word in text for word in _REFUSALS):
        return "Check credentials, nkey, user, token or certificate of the NATS settings."
    return None


def _tls_context(settings: NatsSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ca)
    except (OSError, ssl.SSLError) as error:
        raise _unusable("ca", settings.ca, error) from None
    if settings.certificate is not None:
        try:
            context.load_cert_chain(settings.certificate, settings.key, password=_refuse_password)
        except (OSError, ValueError) as error:
            raise _unusable("certificate or key", settings.certificate, error) from None
    return context


def _refuse_password() -> str:
    raise ValueError("the key has a passphrase, which is not supported")


def _read(name: str, path: str) -> str:
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(name, path, error) from None
    if not text:
        raise InvalidRequest(f"The file {path} of the NATS setting {name} is empty.")
    return text


def _unusable(name: str, path: str | None, error: Exception) -> InvalidRequest:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    return InvalidRequest(f"The file {path} of the NATS setting {name} can't be used: {reason}.")
