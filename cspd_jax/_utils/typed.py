"""Fields of dataclasses are of the type that their annotation says: read from JSON, and given in Python."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any

from cspd_jax._utils import limits
from cspd_jax.errors import UserError, check_range, check_whole, naming, shown

_TEXTS, _NUMBERS = tuple[str, ...], tuple[int, ...]


def read_fields(cls: type, values: Any, where: str, *, every: bool = True) -> dict[str, Any]:
    """The fields that are whole numbers, numbers, flags, texts, tuples of these and dataclasses of them;
    others stay as they are.

    values: a JSON object with all fields of the dataclass, or (`every` is false) with some of them.
    where: begins the sentences of UserErrors, for example "x.json: config".
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{where} must be an object with the fields of {cls.__name__}")
    fields = [field.name for field in dataclasses.fields(cls)]
    missing = [name for name in fields if every and name not in values]
    unknown = [str(name) for name in values if name not in fields]
    if missing or unknown:
        parts = [
            f"{what} {', '.join(names)}"
            for what, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise UserError(f"{where} has wrong fields: {'; '.join(parts)}")
    hints = typing.get_type_hints(cls)
    return {name: _typed(values[name], hints[name], f"{where} field {name}") for name in values}


def _typed(value: Any, hint: Any, what: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        fields = read_fields(hint, value, what)
        with naming(what):
            return hint(**fields)
    whole = type(value) is int
    if hint is int and not whole:
        raise UserError(f"{what} is {shown(value)}; it must be a whole number")
    if hint is float and not (whole or type(value) is float):
        raise UserError(f"{what} is {shown(value)}; it must be a number")
    if hint in (int, float) and not -(2**63) <= value < 2**63:
        raise UserError(f"{what} is {shown(value)}; it must be a number of ordinary size")
    if hint is bool and type(value) is not bool:
        raise UserError(f"{what} is {shown(value)}; it must be true or false")
    if hint is str and (type(value) is not str or len(value) > limits.TEXT):
        raise UserError(f"{what} is {shown(value)}; it must be a string of at most {limits.TEXT} characters")
    if hint in (_TEXTS, _NUMBERS):
        inner = int if hint == _NUMBERS else str
        if not isinstance(value, list) or any(type(v) is not inner for v in value):
            plural = "whole numbers" if inner is int else "strings"
            raise UserError(f"{what} is {shown(value)}; it must be a list of {plural}")
        if len(value) > limits.LISTED:
            raise UserError(f"{what} lists {len(value)} values; it may list {limits.LISTED}")
        return tuple(value)
    return value


def check_kinds(value: Any) -> None:
    """UserError for a field of a dataclass that is not of the kind its annotation says: int, float, bool,
    str, a tuple of strings or whole numbers, or one of these or None. Others are not looked at."""
    for field in dataclasses.fields(value):
        kinds, given = set(str(field.type).split(" | ")), getattr(value, field.name)
        if (given is None and "None" in kinds) or len(kinds - {"None"}) != 1:
            continue
        (kind,) = kinds - {"None"}
        if kind == "int":
            check_whole(field.name, given, -(2**63), 2**63 - 1)
        elif kind == "float":
            check_range(field.name, given)
        elif kind in _KINDS and not _KINDS[kind][1](given):
            raise UserError(f"{field.name} is {shown(given)}; it must be {_KINDS[kind][0]}")


def check_flag(name: str, value: Any) -> None:
    """UserError unless it is True or False."""
    told, is_flag = _KINDS["bool"]
    if not is_flag(value):
        raise UserError(f"{name} is {shown(value)}; it must be {told}")


def _all(kind: type, values: Any) -> bool:
    return type(values) is tuple and all(type(value) is kind for value in values)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {  # by annotation
    "bool": ("True or False", lambda value: type(value).__name__ in ("bool", "bool_")),
    "str": ("a string", lambda value: isinstance(value, str)),
    "tuple[str, ...]": ("a tuple of strings", functools.partial(_all, str)),
    "tuple[int, ...]": ("a tuple of whole numbers", functools.partial(_all, int)),
}


def check_fields(value: Any) -> None:
    """The same, and UserError for a whole number that no int32 holds."""
    check_kinds(value)
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if set(str(field.type).split(" | ")) <= {"int", "None"} and given is not None:
            check_whole(field.name, given, -(2**31), 2**31 - 1)


def reported(value: Any) -> Any:
    """A dataclass as JSON: its fields under their names in reports (`report` of a field's metadata, where
    that is another one; "" leaves the field out)."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    names = {field.name: field.metadata.get("report", field.name) for field in dataclasses.fields(value)}
    return {told: reported(getattr(value, name)) for name, told in names.items() if told}
