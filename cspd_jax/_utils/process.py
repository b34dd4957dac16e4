"""What JAX cannot work with in this process: settings for finding one's own mistakes, and a fork."""

from __future__ import annotations

import os
import sys

from cspd_jax.errors import UserError

_forked = False

# Settings of JAX with which the library does not run, and what they begin with then.
_REFUSED = {
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_transfer_guard": "disallow",
    "jax_transfer_guard_host_to_device": "disallow",
    "jax_transfer_guard_device_to_host": "disallow",
}


def _after_fork() -> None:
    global _forked
    bridge = sys.modules.get("jax._src.xla_bridge")
    started = getattr(bridge, "backends_are_initialized", None)
    _forked = _forked or (started is not None and bool(started()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def check() -> None:
    """UserError where JAX would wait forever, or refuse what the library does."""
    if _forked:
        raise UserError(
            "JAX had begun before this process was forked, and its threads are not here; start processes with"
            " multiprocessing's method spawn"
        )
    import jax

    for name, value in _REFUSED.items():
        found = getattr(jax.config, name, None)
        found = getattr(found, "value", found)  # of an enumeration
        if isinstance(found, str) and found.startswith(value):
            raise UserError(
                f"{name} is {found!r}, a setting for finding mistakes that refuses what this library does;"
                " set it back for its calls"
            )
