"""Advice about errors of TLS."""

import ssl

import pytest

from postroom.application.ingest.broker_access import tls_advice


def chain(*errors: BaseException) -> BaseException:
    """Return the first error; each has the next one as its context, and the last one the first."""
    for error, following in zip(errors, (*errors[1:], errors[0]), strict=True):
        error.__context__ = following
    return errors[0]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (None, None),
        (OSError("reset"), None),
        (ssl.SSLCertVerificationError(1, "expired"), "Check ca, and the name and expiry"),
        (ssl.SSLError(1, "unknown ca"), "Check certificate and key"),
        (
            chain(OSError("outer"), ValueError("between"), ssl.SSLError(1, "alert")),
            "Check certificate and key",
        ),
    ],
)
def test_an_error_of_tls_has_advice_wherever_it_is_in_the_chain(
    error: BaseException | None, advice: str | None
) -> None:
    text = tls_advice(error)
    assert text is None if advice is None else str(text).startswith(advice)


def test_errors_that_are_each_others_context_have_none() -> None:
    assert tls_advice(chain(OSError("one"), OSError("two"), OSError("three"))) is None
