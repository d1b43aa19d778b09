"""Reading YAML files into structs, with errors that name line and key."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec import inspect

from postroom.domain.errors import InvalidRequest

MAX_BYTES = 1 << 20
_NULL, _TEXT, _NUMBER, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("null", "str", "int", "merge"))

Struct = TypeVar("Struct", bound=msgspec.Struct)


class YamlReader:
    """Reader of one YAML file; keys in errors are written like `namespaces[0].slots.storage.backend`."""

    def __init__(self, file: Path) -> None:
        """Take the file's path; paths in the file are relative to its folder."""
        self._file = file
        self._lines: dict[str, int] = {}

    def read(self, kind: type[Struct]) -> Struct:
        """Return the file's content; raise `InvalidRequest` when it is unreadable or invalid."""
        loader = self._open()
        try:
            node = loader.get_single_node()
            if node is None:
                raise self.refusal("", "is empty")
            value: Struct = self._read(loader, node, inspect.type_info(kind), "")
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            line = f", line {mark.line + 1}" if mark else ""
            raise InvalidRequest(f"{self._file}{line}: this is not valid YAML: {error.problem}.") from error
        except yaml.YAMLError as error:
            raise InvalidRequest(f"{self._file} is not valid YAML: {error}.") from error
        except RecursionError:
            raise InvalidRequest(f"{self._file} is nested too deeply to be read.") from None
        finally:
            loader.dispose()
        return value

    def refusal(self, place: str, problem: str) -> InvalidRequest:
        """Return the error about a key of the file.

        Arguments:
            place: the key.
            problem: predicate of the key, without a full stop: `is 3; it must be text`.
        """
        line = self._lines.get(place)
        where = f"{self._file}, line {line}" if line else f"{self._file}"
        return InvalidRequest(f"{where}: {place or 'the file'} {problem}.")

    def _open(self) -> yaml.SafeLoader:
        try:
            with self._file.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise InvalidRequest(
                f"The file {self._file} can't be read: {error.strerror or error}; name a file that exists."
            ) from error
        if len(content) > MAX_BYTES:
            raise InvalidRequest(f"{self._file} is larger than {MAX_BYTES} bytes; split it.")
        try:
            return yaml.SafeLoader(content)
        except yaml.YAMLError as error:
            raise InvalidRequest(f"{self._file} is not valid YAML: {error}.") from error

    def _read(self, loader: yaml.SafeLoader, node: yaml.Node, kind: inspect.Type, place: str) -> Any:
        self._lines.setdefault(place, node.start_mark.line + 1)
        match kind:
            case inspect.StructType():
                return self._struct(loader, node, (kind,), place)
            case inspect.UnionType(types=types):
                if node.tag == _NULL and any(isinstance(one, inspect.NoneType) for one in types):
                    return None
                structs = tuple(one for one in types if isinstance(one, inspect.StructType))
                if len(structs) > 1:
                    return self._struct(loader, node, structs, place)
                return self._read(loader, node, types[0], place)
            case inspect.VarTupleType(item_type=item):
                if not isinstance(node, yaml.SequenceNode):
                    raise self.refusal(place, f"is {_description(loader, node)}; it must be a list")
                return tuple(
                    self._read(loader, one, item, f"{place}[{index}]") for index, one in enumerate(node.value)
                )
            case _:
                return self._scalar(loader, node, kind, place)

    def _struct(
        self, loader: yaml.SafeLoader, node: yaml.Node, kinds: tuple[inspect.StructType, ...], place: str
    ) -> Any:
        entries = self._entries(loader, node, place)
        prefix = f"{place}." if place else ""
        kind = kinds[0]
        if kind.tag_field is not None:
            kind = self._tagged_struct(loader, entries.pop(kind.tag_field, None), kinds, place)
        fields = {field.encode_name: field for field in kind.fields}
        keys = (*fields, *([kind.tag_field] if kind.tag_field else []))
        for key, (key_node, _) in entries.items():
            if key not in fields:
                self._lines[f"{prefix}{key}"] = key_node.start_mark.line + 1
                self._lines[place] = key_node.start_mark.line + 1
                raise self.refusal(
                    place, f"has no key {key!r}{suggestion(key, keys)}; its keys are {', '.join(keys)}"
                )
        values = {}
        for name, field in fields.items():
            if name in entries:
                self._lines[f"{prefix}{name}"] = entries[name][0].start_mark.line + 1
                values[field.name] = self._read(loader, entries[name][1], field.type, f"{prefix}{name}")
            elif field.required:
                raise self.refusal(place, f"has no {name}; it must have one")
        return kind.cls(**values)

    def _tagged_struct(
        self,
        loader: yaml.SafeLoader,
        entry: tuple[yaml.Node, yaml.Node] | None,
        kinds: tuple[inspect.StructType, ...],
        place: str,
    ) -> inspect.StructType:
        """Return the struct that the tag field, such as `backend`, selects."""
        name, by_tag = kinds[0].tag_field, {str(kind.tag): kind for kind in kinds}
        if entry is None:
            raise self.refusal(place, f"has no {name}; it must be {join_with_or(by_tag)}")
        self._lines[f"{place}.{name}"] = entry[1].start_mark.line + 1
        value = _value(loader, entry[1])
        if value not in by_tag:
            raise self.refusal(f"{place}.{name}", _not_one_of(loader, entry[1], by_tag))
        return by_tag[value]

    def _entries(
        self, loader: yaml.SafeLoader, node: yaml.Node, place: str
    ) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise self.refusal(place, f"is {_description(loader, node)}; it must be a mapping")
        keys = set()
        for key, _ in node.value:  # before merging: a key may override a merged one
            if not isinstance(key, yaml.ScalarNode):
                self._lines[place] = key.start_mark.line + 1
                raise self.refusal(place, f"has {_description(loader, key)} as a key; keys must be text")
            if key.value in keys and key.tag != _MERGE:
                self._lines[place] = key.start_mark.line + 1
                raise self.refusal(place, f"has the key {key.value!r} twice; keep one of them")
            keys.add(key.value)
        loader.flatten_mapping(node)
        return {key.value: (key, value) for key, value in node.value}

    def _scalar(self, loader: yaml.SafeLoader, node: yaml.Node, kind: inspect.Type, place: str) -> Any:
        if node.tag == _NULL:
            raise self.refusal(place, "has no value; set one or omit the key")
        value = _value(loader, node)
        match kind:
            case inspect.LiteralType(values=values):
                if value not in values:
                    raise self.refusal(place, _not_one_of(loader, node, values))
                return value
            case inspect.EnumType(cls=enum):
                values = tuple(str(member.value) for member in enum)
                if value not in values:
                    raise self.refusal(place, _not_one_of(loader, node, values))
                return enum(value)
            case inspect.BoolType():
                return self._check_type(loader, node, place, value, bool, "true or false")
            case inspect.IntType(ge=least):
                at_least = f" of at least {least}" if least is not None else ""
                number = self._check_type(loader, node, place, value, int, f"a whole number{at_least}")
                if least is not None and number < least:
                    raise self.refusal(place, f"is {number}; it must be at least {least}")
                return number
            case inspect.FloatType(gt=above):
                number = self._check_type(loader, node, place, value, float, "a number")
                if above is not None and not above < number < float("inf"):
                    raise self.refusal(place, f"is {number}; it must be a number above {above:g}")
                return number
            case inspect.CustomType(cls=cls) if cls is Path:
                text = self._check_type(loader, node, place, value, str, "a path")
                return self._path(text, place)
            case _:
                text = self._check_type(loader, node, place, value, str, "text")
                if not text.strip() or not text.isprintable():
                    raise self.refusal(place, f"is {text!r}; it must be non-blank printable text")
                return text

    def _check_type(
        self, loader: yaml.SafeLoader, node: yaml.Node, place: str, value: Any, kind: type, expected: str
    ) -> Any:
        if type(value) is kind or (kind is float and type(value) is int):
            return value
        advice = ""
        if isinstance(node, yaml.ScalarNode) and kind is str:
            advice = ", so put it in quotes"
        elif node.tag == _TEXT and kind is not str:
            advice = ", without quotes" if node.style else ""  # type: ignore[attr-defined]  # scalars have it
        raise self.refusal(place, f"is {_description(loader, node)}; it must be {expected}{advice}")

    def _path(self, text: str, place: str) -> Path:
        if not text or "\0" in text:
            raise self.refusal(place, f"is {text!r}; it must be a path")
        try:
            return self._file.parent / Path(text).expanduser()
        except RuntimeError:
            raise self.refusal(place, f"is {text!r}, but that home directory is unknown") from None


def suggestion(text: object, names: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` for a close match, else an empty string."""
    close = get_close_matches(str(text), list(names), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def join_with_or(names: Iterable[str]) -> str:
    """Return names joined by commas and `or`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _not_one_of(loader: yaml.SafeLoader, node: yaml.Node, values: Iterable[Any]) -> str:
    names = [str(value) for value in values]
    guess = suggestion(_value(loader, node), names)
    return f"is {_description(loader, node)}{guess}; it must be {join_with_or(names)}"


def _value(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    """Return a scalar as a Python value; None for a mapping or list."""
    if not isinstance(node, yaml.ScalarNode):
        return None
    try:
        return loader.construct_object(node)
    except (ValueError, OverflowError):  # such as 2026-02-30
        return None


def _description(loader: yaml.SafeLoader, node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return repr(node.value) if node.tag == _TEXT else str(node.value) or "empty"
