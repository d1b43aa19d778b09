"""The version of Postroom, which only `pyproject.toml` states (ADR 0150)."""


def own_version() -> str:
    """Return the version of the installed package, or `unknown` in a checkout that is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version("postroom")
    except PackageNotFoundError:
        return "unknown"
