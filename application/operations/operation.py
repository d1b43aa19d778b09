"""The table of operations: what each method of a port takes and returns, and what is derived from it.

The signature of a method, with the bounds of its arguments in `Annotated`, is the only place where they are
written. Checks, codecs, routes and clients are made from it (ADR 0112).
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial, wraps
from types import MappingProxyType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from postroom.application.page import Page
from postroom.domain.arguments import MAX_INT, check_choice, check_int, check_items, check_text, check_type
from postroom.domain.capability.rights import Right
from postroom.domain.errors import InvalidRequest

F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])
C = TypeVar("C", bound=type[Any])

Arguments = Mapping[str, Any]
"""The arguments of a call by name: all of them, each checked."""
Call = Callable[["Operation", Arguments], Awaitable[Any]]
"""Function that answers an operation; guards, namespaces, shared mailboxes and clients have their own."""


class Check(NamedTuple):
    """Metadata of an argument with rules besides its type and bounds.

    Arguments:
        check: returns the value to use, or raises InvalidRequest.
        pattern: matches ASCII text that `check` returns unchanged.
    """

    check: Callable[[Any], Any]
    pattern: re.Pattern[str] | None = None


class Title(NamedTuple):
    """Metadata of an argument: its title in errors, instead of its name."""

    title: str


class SentAs(NamedTuple):
    """Metadata of an argument: its name in the contracts of network surfaces."""

    name: str


BY_SERVER = "entered by the server"
"""Metadata of an argument that a client does not send: a server takes it from the capability of the call."""


class Parameter(NamedTuple):
    """A parameter of an operation.

    Arguments:
        type: its type with bounds; `kind` is the type alone.
        default: `inspect.Parameter.empty` if it has none.
        is_sent: whether network clients send it; `sent_as` is its name there.
        check: returns the value to use, or raises InvalidRequest.
        valid: an expression that is true for most values that `check` returns unchanged; "" for none.
        matches: function that the expression calls as `matches_` with the name of the parameter; None if it
            calls none.
    """

    name: str
    type: Any
    kind: Any
    default: Any
    is_positional: bool
    is_sent: bool
    sent_as: str
    check: Callable[[Any], Any]
    valid: str
    matches: Callable[[str], object] | None

    @property
    def is_required(self) -> bool:
        """Return whether it has no default."""
        return self.default is inspect.Parameter.empty


class Operation:
    """An operation: a method of a port, and how surfaces offer it.

    Arguments:
        method: the method; its docstring describes the operation.
        right: what a capability must allow.
        verb, path: its HTTP route; placeholders of the path are names of arguments as they are sent.
        is_repeatable: whether a client may repeat a call whose outcome is unknown.
        answer: name of the field of an answer that holds the result; "" if the result is the answer.
    """

    def __init__(
        self, method: Callable[..., Any], right: Right, route: str, *, is_repeatable: bool, answer: str
    ) -> None:
        self.method = method
        self.name = method.__name__
        self.right = right
        self.verb, _, self.path = route.partition(" ")
        self.is_repeatable = is_repeatable
        self.answer = answer

    # Type hints are read at the first call: most processes use few operations, and reading takes long.

    @cached_property
    def _hints(self) -> dict[str, Any]:
        return get_type_hints(self.method, include_extras=True)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Return the parameters, in the order of the signature."""
        parameters = list(inspect.signature(self.method).parameters.values())[1:]
        return tuple(_read_parameter(each, self._hints[each.name]) for each in parameters)

    @property
    def result(self) -> Any:
        """Return the type of the result."""
        return self._hints["return"]

    @cached_property
    def items(self) -> Any:
        """Return the type of the items if the result is a page; else None."""
        return msgspec.structs.fields(self.result)[0].type if get_origin(self.result) is Page else None

    @cached_property
    def positional(self) -> tuple[str, ...]:
        """Return the names of the positional parameters."""
        return tuple(each.name for each in self.parameters if each.is_positional)

    @cached_property
    def summary(self) -> str:
        """Return the first sentence of its documentation, without the clauses that it quotes."""
        sentence = (inspect.getdoc(self.method) or "").split("\n\n")[0].replace("\n", " ")
        return re.sub(r" \((?:svc-mailbox|RFC|SDS)[^)]*\)", "", sentence)

    @cached_property
    def raised(self) -> frozenset[str]:
        """Return the names of the errors that its documentation says it raises."""
        return frozenset(
            re.findall(r"\b[A-Z]\w+", (inspect.getdoc(self.method) or "").partition("Raises: ")[2])
        )

    def stated(self, arguments: Arguments) -> dict[str, Any]:
        """Return arguments by name without options at their defaults, which an older owner may not know."""
        return {
            each.name: arguments[each.name]
            for each in self.parameters
            if each.is_positional or each.is_required or arguments[each.name] != each.default
        }

    async def ask(self, mailbox: object, arguments: Arguments) -> Any:
        """Call the method of a mailbox with these arguments, which it checks."""
        rest = dict(arguments)
        positional = [rest.pop(name) for name in self.positional if name in rest]
        return await getattr(mailbox, self.name)(*positional, **rest)

    @cached_property
    def bind(self) -> Callable[..., dict[str, Any]]:
        """Return a function with the signature of the method that returns all arguments by name, checked.

        It raises InvalidRequest naming the first argument that is of a wrong type or out of bounds. It is
        compiled, as `__init__` of a dataclass is: a loop over the parameters would take three times as long.
        """
        signature = inspect.signature(self.method)
        parameters, values = [], list[str]()
        scope: dict[str, Any] = {"_type": type, "_int": int, "_str": str, "_len": len}
        scope |= {f"matches_{each.name}": each.matches for each in self.parameters}
        for number, each in enumerate(self.parameters):
            default: Any = each.default
            if not each.is_required:
                scope[f"default_{number}"] = default
                default = _Expression(f"default_{number}")
            kind = signature.parameters[each.name].kind
            parameters.append(inspect.Parameter(each.name, kind, default=default))
            scope[f"check_{number}"] = each.check
            valid = [each.valid] if each.valid else []
            if not each.is_required and each.check(each.default) == each.default:  # most are left out
                valid.insert(0, f"{each.name} is default_{number}")
            value = f"check_{number}({each.name})"
            if valid:
                value = f"{each.name} if {' or '.join(valid)} else {value}"
            values.append(f"{each.name!r}: {value}")
        shown = inspect.Signature(parameters)
        exec(f"def {self.name}{shown}: return {{{', '.join(values)}}}", scope)
        compiled: Callable[..., dict[str, Any]] = scope[self.name]
        return compiled


def arguments_struct(
    operation: Operation,
    parameters: Sequence[Parameter] | None = None,
    types: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Return the type of a request with arguments of an operation, by the names under which they are sent.

    Arguments:
        parameters: those of the request; None for all.
        types: types, by name, of arguments that have other bounds in a contract.
    """
    fields: list[Any] = []
    for each in operation.parameters if parameters is None else parameters:
        field = (each.sent_as, types.get(each.name, each.type))
        fields.append(field if each.is_required else (*field, each.default))
    return msgspec.defstruct(
        re.sub(r"(?:^|_)(\w)", lambda match: match[1].upper(), operation.name),
        fields,
        frozen=True,
        forbid_unknown_fields=True,
        kw_only=True,
        namespace={"__doc__": operation.summary},
    )


class _Expression(str):
    """Text that `inspect.Signature` writes as it is."""

    __repr__ = str.__str__


def operation(right: Right, route: str, *, is_repeatable: bool = True, answer: str = "") -> Callable[[F], F]:
    """Mark a method of a port as an operation; see `Operation`."""

    def mark(method: F) -> F:
        made = Operation(method, right, route, is_repeatable=is_repeatable, answer=answer)
        method.__operation__ = made  # type: ignore[attr-defined] # functions have attributes
        return method

    return mark


def read_operations(port: type) -> dict[str, Operation]:
    """Return the operations of a port by name, in the order of its methods."""
    return {
        name: method.__operation__ for name, method in vars(port).items() if hasattr(method, "__operation__")
    }


def derive(port: type) -> Callable[[C], C]:
    """Give a class the operations of a port that it lacks.

    They check their arguments and await a `Call`: the method with the name of the operation after an
    underscore if the class has one; else `_call`.
    """

    def fill(kind: C) -> C:
        for name, operation in read_operations(port).items():
            if getattr(kind, name, None) is operation.method:
                setattr(kind, name, _derived(operation, f"_{name}" if hasattr(kind, f"_{name}") else "_call"))
        return kind

    return fill


def _derived(operation: Operation, answer: str) -> Callable[..., Any]:
    @wraps(operation.method)
    async def call(self: object, /, *arguments: object, **options: object) -> Any:
        answers: Call = getattr(self, answer)
        return await answers(operation, operation.bind(*arguments, **options))

    return call


def _read_parameter(parameter: inspect.Parameter, hint: Any) -> Parameter:
    is_sent = True
    if get_origin(hint) is Annotated and BY_SERVER in hint.__metadata__:
        is_sent, hint = False, get_args(hint)[0]
    return Parameter(
        parameter.name,
        hint,
        get_args(hint)[0] if get_origin(hint) is Annotated else hint,
        parameter.default,
        parameter.kind is parameter.POSITIONAL_ONLY,
        is_sent,
        next((each.name for each in _metadata(hint) if isinstance(each, SentAs)), parameter.name),
        _check_of(parameter.name, hint),
        _valid(parameter.name, hint),
        None if (pattern := _pattern(hint)) is None else pattern.match,
    )


def _metadata(hint: Any) -> tuple[Any, ...]:
    return hint.__metadata__ if get_origin(hint) is Annotated else ()


def _pattern(hint: Any) -> re.Pattern[str] | None:
    return next((each.pattern for each in _metadata(hint) if isinstance(each, Check)), None)


def _check_of(name: str, hint: Any) -> Callable[[Any], Any]:
    """Return the check of an argument: its `Check`, or one of its type and bounds."""
    kind, metadata = get_args(hint)[0] if get_origin(hint) is Annotated else hint, _metadata(hint)
    for each in metadata:
        if isinstance(each, Check):
            return each.check
    choices = get_args(kind)
    if get_origin(kind) in (Union, UnionType) and NoneType in choices:
        (other,) = (each for each in choices if each is not NoneType)
        return partial(_check_optional, _check_of(name, other))
    if get_origin(kind) in (Union, UnionType):
        return partial(_check_any, [_check_of(name, each) for each in choices])
    if get_origin(kind) is Literal:
        return lambda value: check_choice(name, value, choices)
    if get_origin(kind) is Sequence:
        return partial(_check_all, name, _check_of(name, choices[0]))
    bounds = next((each for each in metadata if isinstance(each, msgspec.Meta)), msgspec.Meta())
    title = next((each.title for each in metadata if isinstance(each, Title)), name)
    if kind is int:
        return lambda value: check_int(title, value, int(bounds.ge or 0), int(bounds.le or MAX_INT))
    if kind is str:
        return lambda value: check_text(title, value, bounds.min_length or 0, bounds.max_length or MAX_INT)
    return lambda value: check_type(title, value, kind)


def _valid(name: str, hint: Any) -> str:
    """Return the check of a number or an ASCII text as an expression, for `Operation.bind`; else "".

    It saves the call of a function for nearly every value.
    """
    kind, metadata = get_args(hint)[0] if get_origin(hint) is Annotated else hint, _metadata(hint)
    if _pattern(hint) is not None:
        return f"_type({name}) is _str and {name}.isascii() and matches_{name}({name})"
    if any(isinstance(each, Check) for each in metadata):
        return ""
    bounds = next((each for each in metadata if isinstance(each, msgspec.Meta)), msgspec.Meta())
    if kind is int:
        return f"_type({name}) is _int and {bounds.ge or 0} <= {name} <= {bounds.le or MAX_INT}"
    if kind is str:
        length = f"{bounds.min_length or 0} <= _len({name}) <= {bounds.max_length or MAX_INT}"
        return f"_type({name}) is _str and {length} and {name}.isascii()"
    return ""


def _check_optional(check: Callable[[Any], Any], value: object) -> Any:
    return None if value is None else check(value)


def _check_any(checks: Sequence[Callable[[Any], Any]], value: object) -> Any:
    """Return what the first check returns that accepts the value; raise the error of the last one."""
    for check in checks[:-1]:
        with suppress(InvalidRequest):
            return check(value)
    return checks[-1](value)


def _check_all(name: str, check: Callable[[Any], Any], values: object) -> list[Any]:
    return [check(each) for each in check_items(name, values)]
