"""Argument checks that raise a `UserError` in one sentence. Traced values are not looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils.arrays import as_array
from cspd_jax.errors import UserError, shown
from cspd_jax.keys import keys_per_row

Array = jax.Array
_MOST_IDS = 2**16  # that end a text


def concrete(value: Any) -> np.ndarray | None:
    """Returns the value as a numpy array; None if there is none or it is traced."""
    return None if value is None or isinstance(value, jax.core.Tracer) else as_array(value)


def require(condition: Any, sentence: str) -> None:
    """Raises a UserError with this sentence unless the condition holds."""
    if not condition:
        raise UserError(sentence)


def holds(value: Any, test: Callable[[np.ndarray], Any], unknown: bool = True) -> bool:
    """Returns whether `test` is true of every entry of the value; `unknown` if it is None or traced."""
    known = concrete(value)
    if known is None:
        return unknown
    # float16 is too narrow for the bounds of wider types.
    wide = known.astype(np.float64) if jnp.issubdtype(known.dtype, jnp.floating) else known
    return bool(np.all(test(wide)))


def check_outside_jit(inputs: Any, what: str) -> None:
    """UserError for inputs that are traced, of what goes round by round."""
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(inputs))
    require(not traced, f"{what} looks at each round, so it cannot be traced; call generate inside jit")


def check_number(name: str, value: Any, test: Callable[[np.ndarray], Any], valid: str) -> None:
    """Raises a UserError unless `test` is true of every entry; `valid` says in words what is allowed."""
    require(holds(value, test), f"{name} is {value}; it must be {valid}")


def number(
    test: Callable[[np.ndarray], Any], valid: str, *, whole: bool = False
) -> Callable[[str, Any, int], None]:
    """The check of an option that is None, one number, or one for each row; `valid` says in words what is
    allowed."""

    def check(name: str, value: Any, batch: int) -> None:
        kinds = (jnp.integer,) if whole else (jnp.integer, jnp.floating)
        words = "a whole number" if whole else "a number"
        try:
            known = concrete(value)
        except (ValueError, OverflowError):  # lists of several lengths, numbers of hundreds of digits
            known = np.asarray("no number")
        is_kind = known is None or any(jnp.issubdtype(known.dtype, one) for one in kinds)
        require(is_kind, f"{name} is {shown(value)}; it must be {words}")
        require(
            value is None or np.shape(value) in ((), (batch,)),
            f"{name} has shape {np.shape(value)}; it must be one number, or one for each of {batch} rows",
        )
        check_number(name, value, test, valid)

    return check


def whole_number(test: Callable[[np.ndarray], Any], valid: str) -> Callable[[str, Any, int], None]:
    """Returns the same check for whole numbers."""
    return number(test, valid, whole=True)


def size(name: str, value: Any, batch: int) -> None:
    """Checks a static size: None, or a whole number of at least 1."""
    traced = isinstance(value, jax.core.Tracer)
    require(not traced, f"{name} is traced; it must be static")
    number(lambda n: n >= 1, "at least 1", whole=True)(name, value, batch)


def given_size(name: str, value: Any, batch: int) -> None:
    """Checks a static size that cannot be None."""
    require(value is not None, f"{name} is None; it must be a whole number of at least 1")
    size(name, value, batch)


def bound_on(what: str) -> Callable[[str, Any, int], None]:
    """Returns the check of a static bound: None, or a whole number."""

    def check(name: str, value: Any, batch: int) -> None:
        require(
            not isinstance(value, jax.core.Tracer),
            f"{name} is traced; the bound on the {what} must be static",
        )
        number(lambda n: n >= 0, "at least 0", whole=True)(name, value, batch)

    return check


def list_of_ids(name: str, value: Any, batch: int) -> None:
    """Checks ids [S]: None, or whole numbers that an int32 holds."""
    sentence = f"{name} is {shown(value)}; it must be a list of ids, for example [0, 2]"
    many = np.size(value) if hasattr(value, "shape") else len(value) if hasattr(value, "__len__") else 0
    require(many <= _MOST_IDS, f"{name} has more than {_MOST_IDS} ids")
    try:
        known = concrete(value)
    except (ValueError, OverflowError):
        raise UserError(sentence) from None
    if known is not None:
        whole = known.ndim == 1 and (not known.size or known.dtype.kind in "iu")
        require(whole and (known >= 0).all() and (known < 2**31).all(), sentence)


def check_max_gamma(gamma: Any, max_gamma: int | None) -> int:
    """Returns the static bound on gamma: max_gamma, or the largest gamma if that is None."""
    require(
        max_gamma is not None or concrete(gamma) is not None, "gamma is traced, so max_gamma must be given"
    )
    return int(np.max(gamma)) if max_gamma is None else max_gamma


def keys_of_rows(key: Array | None, batch: int) -> Array | None:
    """One key per row [B], from one key for all of them or one for each; None stays None."""
    if key is None:
        return None
    return keys_per_row(key, batch)


def at_most(number: Array | int, limit: int) -> Array:
    """Returns the smaller one as int32; the number itself may be too large for that."""
    known = concrete(number)
    if known is not None:
        return jnp.asarray(np.minimum(known, limit), jnp.int32)
    return jnp.minimum(jnp.asarray(number, jnp.int32), limit)
