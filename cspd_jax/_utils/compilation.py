"""How programs are compiled: who runs their loops, where they are cached, and how long
compiling took."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from cspd_jax._utils.files import cache_folder

Function = TypeVar("Function", bound=Callable[..., Any])

# A GPU runs loops and conditions by itself, in its command buffers, and the host no
# longer reads what they depend on. For your own `jax.jit(function,
# compiler_options=DEVICE_LOOPS)`; a jit inside another may not have any.
DEVICE_LOOPS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
}
_asked = {"device_loops": False}


def device_loops(on: bool) -> None:
    """From now on a GPU runs the loops of this library's programs by itself; off, the
    host does, as by default.

    What is drawn is the same. No GPU has been measured with it yet.
    """
    _asked["device_loops"] = on


def has_device_loops() -> bool:
    """Says whether loops of the device are asked for."""
    return _asked["device_loops"]


def outermost_jit(function: Function, **how: Any) -> Function:
    """Jits a function with loops, by the options that `device_loops` asks for unless it
    is called in another jit, whose options then count."""
    inside = jax.jit(function, **how)
    alone = jax.jit(function, compiler_options=DEVICE_LOOPS, **how)

    @functools.wraps(function)
    def call(*args, **named):
        # While something is traced, every new array is a tracer.
        if not has_device_loops() or isinstance(jnp.zeros(()), jax.core.Tracer):
            return inside(*args, **named)
        try:
            return alone(*args, **named)
        except jax.errors.JaxRuntimeError as error:
            if next(iter(DEVICE_LOOPS)) not in str(error):
                raise
            warnings.warn(f"loops stay with the host: {error}", stacklevel=2)
            device_loops(False)
            return inside(*args, **named)

    return cast(Function, call)


_COMPILING = "/jax/core/compile/"
_spent = {"seconds": 0.0, "listening": False}


def use_cache() -> None:
    """Turns on JAX's persistent cache, in the user's cache folder unless JAX was told
    another one."""
    if not getattr(jax.config, "jax_compilation_cache_dir", None):
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def compile_seconds() -> float:
    """Returns the seconds spent tracing and compiling since the first call of this
    function."""
    if not _spent["listening"]:
        jax.monitoring.register_event_duration_secs_listener(_add)
        _spent["listening"] = True
    return _spent["seconds"]


def _add(event: str, duration_secs: float, **_) -> None:
    if event.startswith(_COMPILING):
        _spent["seconds"] += duration_secs
