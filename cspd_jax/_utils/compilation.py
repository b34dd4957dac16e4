"""The compilation cache of the command line, and the time spent compiling."""

from __future__ import annotations

import jax

from cspd_jax._utils.files import cache_folder

_COMPILING = "/jax/core/compile/"
_spent = {"seconds": 0.0, "listening": False}


def use_cache() -> None:
    """Turns on JAX's persistent cache, in the user's cache folder unless JAX was told another one."""
    if not getattr(jax.config, "jax_compilation_cache_dir", None):
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def compile_seconds() -> float:
    """Returns the seconds spent tracing and compiling since the first call of this function."""
    if not _spent["listening"]:
        jax.monitoring.register_event_duration_secs_listener(_add)
        _spent["listening"] = True
    return _spent["seconds"]


def _add(event: str, duration_secs: float, **_) -> None:
    if event.startswith(_COMPILING):
        _spent["seconds"] += duration_secs
