"""JSON values as columns of a declared type."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import msgspec
import pyarrow as pa

from postroom.domain.errors import InvalidRequest

_SCALARS: dict[pa.DataType, Any] = {
    pa.string(): str,
    pa.bool_(): bool,
    pa.int8(): Annotated[int, msgspec.Meta(ge=-(2**7), le=2**7 - 1)],
    pa.int16(): Annotated[int, msgspec.Meta(ge=-(2**15), le=2**15 - 1)],
    pa.int32(): Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)],
    pa.int64(): Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)],
    pa.float32(): float,
    pa.float64(): float,
    pa.date32(): date,
    pa.binary(): bytes,
}
_UNFIT = (pa.ArrowException, OverflowError)
"""Errors that Arrow raises for a value that does not fit its type."""


def check_document_type(place: str, type_: pa.DataType) -> None:
    """Raise InvalidRequest unless a type is a struct, array or map that JSON values can have.

    Arguments:
        place: name of the value for errors, such as `payload.order`.
    """
    if not (pa.types.is_struct(type_) or pa.types.is_list(type_) or pa.types.is_map(type_)):
        raise InvalidRequest(f"{place} is declared as {type_}; declare a string, struct, array or map.")
    json_type(place, type_)


def json_type(place: str, type_: pa.DataType) -> Any:
    """Return the msgspec type that decodes JSON values of an Arrow type.

    Raises: InvalidRequest for a type without JSON values, and for one that is not nullable.
    """
    if pa.types.is_struct(type_):
        fields = {field.name: _nullable(f"{place}.{field.name}", field) for field in type_}
        if len(fields) != type_.num_fields:
            raise InvalidRequest(f"{place} is declared with two fields of the same name; rename one.")
        return TypedDict("Object", fields, total=False)  # type: ignore[operator]  # made of a declared schema
    if pa.types.is_list(type_):
        return list[_nullable(f"{place}[]", type_.value_field)]  # type: ignore[misc]
    if pa.types.is_map(type_) and type_.key_type == pa.string():
        return dict[str, _nullable(f"{place}[]", type_.item_field)]  # type: ignore[misc]
    if pa.types.is_timestamp(type_):
        return datetime
    if pa.types.is_decimal(type_):
        return Decimal
    if type_ in _SCALARS:
        return _SCALARS[type_]
    raise InvalidRequest(
        f"{place} is declared as {type_}, which JSON lacks; declare it as string and convert it."
    )


def _nullable(place: str, field: pa.Field) -> Any:
    if not field.nullable:
        raise InvalidRequest(
            f"{place} is declared as not null, but a payload may lack it; declare it without NOT NULL."
        )
    return json_type(place, field.type) | None


class DocumentColumn:
    """A column of a declared type, decoded from JSON documents."""

    def __init__(self, type_: pa.DataType) -> None:
        """Take a type that `check_document_type` allows."""
        self._type = type_
        self._decode = _decoder(type_)
        self._fields: dict[str, tuple[pa.DataType, Any]] = {}
        if pa.types.is_struct(type_):
            self._fields = {field.name: (field.type, _decoder(field.type)) for field in type_}

    def array(self, documents: Sequence[str | None]) -> tuple[pa.Array, list[str | None]]:
        """Return documents as an Arrow array, and the problem of each document or None.

        In an object, only the fields that do not have their declared type are null.
        """
        values, problems = [], []
        for document in documents:
            value, problem = (None, None) if document is None else self._value(document)
            values.append(value)
            problems.append(problem)
        try:
            return pa.array(values, self._type), problems
        except _UNFIT:  # such as a decimal number with too many digits
            fitting = [self._fit(value) for value in values]
        values = [value for value, _ in fitting]
        problems = [old or new for old, (_, new) in zip(problems, fitting, strict=True)]
        return pa.array(values, self._type), problems

    def _value(self, document: str) -> tuple[Any, str | None]:
        try:
            return self._decode(document), None
        except msgspec.DecodeError as error:
            problem = f"does not have the declared type: {error}"
        try:
            raw = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            return None, problem
        return self._each_field(
            raw, lambda decode, _, value: decode(value)
        ) if self._fields else None, problem

    def _fit(self, value: Any) -> tuple[Any, str | None]:
        """Return a value that Arrow accepts, and the problem of the original or None."""
        try:
            pa.array([value], self._type)
        except _UNFIT as error:
            fields = value if self._fields else {}
            fitting = self._each_field(fields, lambda _, type_, each: pa.array([each], type_)[0].as_py())
            return fitting if self._fields else None, f"does not have the declared type: {error}"
        return value, None

    def _each_field(self, values: Mapping[str, Any], convert: Callable[[Any, pa.DataType, Any], Any]) -> Any:
        """Return the fields of an object that can be converted."""
        converted = {}
        for name, (type_, decode) in self._fields.items():
            if name in values:
                with suppress(msgspec.DecodeError, *_UNFIT):
                    converted[name] = convert(decode, type_, values[name])
        return converted


def _decoder(type_: pa.DataType) -> Callable[[Any], Any]:
    return msgspec.json.Decoder(json_type("", type_) | None, strict=False).decode
