"""What the fork server of the console script imports: what most commands and servers need that tests run."""

import adbc_driver_sqlite.dbapi  # noqa: F401 - all of this module is its imports
import aiohttp  # noqa: F401
import httptools  # noqa: F401
import prometheus_client  # noqa: F401
import pyarrow.dataset  # noqa: F401
import sqlalchemy.dialects.sqlite  # noqa: F401
import typer.rich_utils  # noqa: F401
import uvicorn  # noqa: F401

import postroom.adapters.cli.cluster
import postroom.adapters.cli.config
import postroom.adapters.cli.main
import postroom.adapters.cli.messages
import postroom.adapters.cli.search
import postroom.adapters.cli.serve
import postroom.adapters.cli.work
import postroom.adapters.compose.connect
import postroom.adapters.compose.outbox
import postroom.adapters.compose.projections
import postroom.adapters.compose.queries
import postroom.adapters.compose.serve
import postroom.adapters.grpc.server
import postroom.adapters.http_server.app
import postroom.adapters.http_server.server
import postroom.adapters.nats
import postroom.adapters.postgres.event_log
import postroom.adapters.postgres.store
import postroom.adapters.sqlite.log_reader
import postroom.adapters.sqlite.read_model_store
import postroom.adapters.sqlite.read_model_updater
import postroom.adapters.sqlite.read_models  # noqa: F401
