"""The distinct values of an indexed column, read without all of its rows."""

from typing import Any

from sqlalchemy import ColumnElement, Select, literal, select

from postroom.adapters.sql.search import Dialect


def distinct_values(column: ColumnElement[Any], start: str, limit: int, dialect: Dialect) -> Select[Any]:
    """Return the statement for the first distinct values of an indexed column from a text on.

    Each step finds the next value in the index, however many rows have the same.
    """
    value, conditions = dialect.sortable(column)

    def following(condition: ColumnElement[bool]) -> Any:
        return select(value).where(condition, *conditions).order_by(value).limit(1).scalar_subquery()

    step = select(following(value >= start).label("value"), literal(1).label("number"))
    values = step.cte("distinct_values", recursive=True)
    values = values.union_all(
        select(following(value > values.c.value), values.c.number + 1).where(
            values.c.value.is_not(None), values.c.number < limit
        )
    )
    return select(values.c.value).where(values.c.value.is_not(None))
