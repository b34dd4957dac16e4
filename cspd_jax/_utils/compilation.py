"""The compilation cache of the command line, and the time spent compiling."""

from __future__ import annotations

import os

import jax

from cspd_jax._utils.files import cache_folder

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"  # JAX's own; it also has JAX_ENABLE_COMPILATION_CACHE=false
_COMPILING = "/jax/core/compile/"
_spent = {"seconds": 0.0, "listening": False}


def use_cache() -> None:
    """Turns on JAX's persistent cache, in the user's cache folder unless JAX was told another one."""
    if os.environ.get(CACHE_VARIABLE) or getattr(jax.config, "jax_compilation_cache_dir", None):
        return
    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # without a cache it is only slower
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def compile_seconds() -> float:
    """Seconds spent tracing and compiling since the first call of this function."""
    if not _spent["listening"]:
        jax.monitoring.register_event_duration_secs_listener(_add)
        _spent["listening"] = True
    return _spent["seconds"]


def _add(event: str, duration_secs: float, **_) -> None:
    if event.startswith(_COMPILING):
        _spent["seconds"] += duration_secs
