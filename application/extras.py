"""Optional dependencies, and the extras that install them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from postroom.domain.errors import PostroomError

EXTRAS = {
    "adbc_driver_manager": "views",
    "adbc_driver_postgresql": "views",
    "adbc_driver_sqlite": "views",
    "aio_pika": "rabbitmq",
    "aiohttp": "http",
    "aiormq": "rabbitmq",
    "asgiref": "django",
    "chdb": "clickhouse",
    "clickhouse_connect": "clickhouse",
    "confluent_kafka": "kafka",
    "cronsim": "schedule",
    "cryptography": "postgres",
    "django": "django",
    "django_tasks": "django",
    "duckdb": "reports",
    "eventsourcing": "postgres",
    "grpc": "grpc",
    "grpc_health": "grpc",
    "grpc_reflection": "grpc",
    "httptools": "serve",
    "jinja2": "console",
    "jsonschema_rs": "namespaces",
    "markupsafe": "console",
    "mcp": "mcp",
    "nats": "nats",
    "nkeys": "nats",
    "opentelemetry": "otel",
    "polars": "views",
    "prometheus_client": "views",
    "psycopg": "postgres",
    "pyarrow": "views",
    "pygal": "reports",
    "pyspark": "spark",
    "pytest_asyncio": "testing",
    "python_multipart": "console",
    "redis": "redis",
    "rfc3161_client": "anchors",
    "sentry_sdk": "sentry",
    "sqlalchemy": "views",
    "standardwebhooks": "http",
    "starlette": "console",
    "urllib3": "clickhouse",
    "uvicorn": "serve",
    "uvloop": "serve",
    "watchfiles": "up",
    "yaml": "namespaces",
    "yarl": "http",
}
"""Extra by top-level module; if several extras install it, the first."""


class MissingExtra(PostroomError, ImportError):
    """An optional dependency is not installed."""

    code = "E_MISSING_EXTRA"
    status = 501

    def __reduce__(self) -> str | tuple[Any, ...]:
        return ImportError.__reduce__(self)  # also copies the attributes of an import error


@contextmanager
def explain_missing_extra(extra: str | None = None, otherwise: str = "") -> Iterator[None]:
    """Replace the import error of an optional dependency with one that names its extra.

    Arguments:
        extra: the extra to name; None uses `EXTRAS`.
        otherwise: what the user can do instead.

    Raises: MissingExtra when an optional dependency can't be imported within the context.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        raise MissingExtra(
            f"This needs the package {module}, which is not installed; "
            f"run: pip install 'postroom[{extra or EXTRAS[module]}]'{otherwise and f', or {otherwise}'}."
        ) from error
