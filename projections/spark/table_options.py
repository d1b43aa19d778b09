"""Options of tables: `CREATE TABLE ... USING postroom_events OPTIONS (...)`.

Spark 4.3 passes the options of a table to `DataSource.schema` when the table is created, but not when it is
read. It stores the schema with the table, including the metadata of columns, and passes it to the reader; so
the options are stored in that metadata.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from postroom.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

METADATA = "postroom.options"
"""Key in the metadata of a table's first column."""
_OPTION = "option."
"""Prefix of options among the properties of a table."""
_PASSWORD = re.compile(r"//[^/]*:[^/]*@|[?&](ssl)?password=")
_STORE = ("path", "url")


def table_options(values: Mapping[str, str]) -> dict[str, str] | None:
    """Return the options of a table while Spark creates it, or None at other times.

    Arguments:
        values: options and properties of the table, by name.
    """
    if "provider" not in values:
        return None
    options = {name.removeprefix(_OPTION): values[name] for name in values if name.startswith(_OPTION)}
    return options | {name: values[name] for name in values if name == "path"}


def store_options(source: str, schema: "StructType", options: Mapping[str, str]) -> None:
    """Store the options of a table in its schema.

    Arguments:
        source: name of the data source, for errors.

    Raises: InvalidRequest for a password, as every user of the table could read it.
    """
    for name in _STORE:
        if _PASSWORD.search(options.get(name, "")):
            raise InvalidRequest(
                f"The option {name} of {source} has a password, which a table would store in clear text; "
                "remove it and put it into ~/.pgpass on every node, or create a temporary view."
            )
    schema.fields[0].metadata[METADATA] = msgspec.json.encode(options).decode()


def stored_options(schema: "StructType", values: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a query with those of its table, unless the query names another store."""
    if any(name in values for name in _STORE):
        return dict(values)
    for field in schema.fields:
        if METADATA in (field.metadata or {}):
            stored = msgspec.json.decode(field.metadata[METADATA], type=dict[str, str])
            return {**stored, **values}
    return dict(values)
