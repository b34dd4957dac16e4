"""The kinds of checkpoint: which configuration class and which network each one has."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

from cspd_jax.errors import UserError
from cspd_jax.networks import autoencoder, lm, mar
from cspd_jax.networks.config import KLConfig, MARConfig
from cspd_jax.networks.lm_config import LMConfig


class Kind(NamedTuple):
    config_class: type  # a frozen dataclass
    abstract_params: Callable[[Any], Any]  # config -> nested dict of ShapeDtypeStruct


_KINDS: dict[str, Kind] = {
    "mar": Kind(MARConfig, mar.abstract_params),
    "kl16": Kind(KLConfig, autoencoder.abstract_params),
    "lm": Kind(LMConfig, lm.abstract_params),
}


def register_kind(name: str, config_class: type, abstract_params: Callable[[Any], Any]) -> None:
    """Makes `save` and `load` know another kind of network."""
    _KINDS[name] = Kind(config_class, abstract_params)


def get_kind(name: Any, where: str) -> Kind:
    if not isinstance(name, str) or name not in _KINDS:
        raise UserError(
            f"{where} is of the unknown kind {name!r}; known kinds are {', '.join(sorted(_KINDS))}"
        )
    return _KINDS[name]


def read_config(kind: Kind, values: Any, where: str):
    """A JSON object -> the kind's configuration; every field must be there, with its type, and no other."""
    if not isinstance(values, dict):
        raise UserError(f"{where}: config must be an object with the sizes of the network")
    hints = typing.get_type_hints(kind.config_class)
    fields = [field.name for field in dataclasses.fields(kind.config_class)]
    missing, unknown = [f for f in fields if f not in values], [v for v in values if v not in fields]
    if missing or unknown:
        parts = [
            f"{what} {', '.join(names)}"
            for what, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise UserError(f"{where}: config has wrong fields: {'; '.join(parts)}")
    return kind.config_class(**{name: _typed(values[name], hints[name], name, where) for name in fields})


def describe_params(kind: Kind, config: Any, where: str):
    """The kind's abstract parameters for a configuration that may be nonsense."""
    try:
        return kind.abstract_params(config)
    except UserError:
        raise
    except Exception as error:  # whatever the network stumbles over
        raise UserError(f"{where}: config describes no possible network ({error})") from error


def _typed(value: Any, hint: Any, name: str, where: str) -> Any:
    whole = type(value) is int
    if hint is int and not whole:
        raise UserError(f"{where}: config field {name} is {value!r}; it must be a whole number")
    if hint is float and not (whole or type(value) is float):
        raise UserError(f"{where}: config field {name} is {value!r}; it must be a number")
    if hint is bool and type(value) is not bool:
        raise UserError(f"{where}: config field {name} is {value!r}; it must be true or false")
    if hint is str and not isinstance(value, str):
        raise UserError(f"{where}: config field {name} is {value!r}; it must be a string")
    if hint == tuple[int, ...]:
        if not isinstance(value, list) or any(type(v) is not int for v in value):
            raise UserError(f"{where}: config field {name} is {value!r}; it must be a list of whole numbers")
        return tuple(value)
    return value
