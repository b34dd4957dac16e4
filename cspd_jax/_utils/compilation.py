"""How programs are compiled: whether the host or the device runs their loops, where
compiled programs are cached, and how long compiling took."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from cspd_jax._utils.files import cache_folder

Function = TypeVar("Function", bound=Callable[..., Any])

# With these compiler options a GPU runs loops and conditions by itself, in its command
# buffers, and the host no longer reads their conditions. They can be given to a
# `jax.jit(function, compiler_options=DEVICE_LOOPS)` of your own. A jit inside another
# jit may not have compiler options.
DEVICE_LOOPS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
}
_asked = {"device_loops": False}


def device_loops(on: bool) -> None:
    """Chooses who runs the loops of this library's programs from now on: the GPU itself
    if `on` is true, otherwise the host, which is the default.

    The choice does not change any result. It has not been measured on a GPU yet.
    """
    if not isinstance(on, bool):
        raise TypeError(f"on is {on!r}; it must be True or False")
    _asked["device_loops"] = on


def has_device_loops() -> bool:
    """Returns whether `device_loops` is on."""
    return _asked["device_loops"]


def outermost_jit(function: Function, **how: Any) -> Function:
    """Jits a function that has loops, with the compiler options of `device_loops` if
    that is on. If the function is called inside another jit, the options of the other
    jit apply."""
    inside = jax.jit(function, **how)
    alone = jax.jit(function, compiler_options=DEVICE_LOOPS, **how)

    @functools.wraps(function)
    def call(*args, **named):
        # Inside another jit, every new array is a tracer.
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
    """Turns on JAX's persistent compilation cache, in the user's cache folder. Does
    nothing if JAX is configured to use another folder."""
    if not getattr(jax.config, "jax_compilation_cache_dir", None):
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def compile_seconds() -> float:
    """Returns the seconds that JAX spent on tracing and compiling since the first call
    of this function."""
    if not _spent["listening"]:
        jax.monitoring.register_event_duration_secs_listener(_add)
        _spent["listening"] = True
    return _spent["seconds"]


def _add(event: str, duration_secs: float, **_) -> None:
    if event.startswith(_COMPILING):
        _spent["seconds"] += duration_secs
