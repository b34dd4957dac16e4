"""Speculative decoding that does not change what comes out, in JAX."""

import importlib

__version__ = "0.1.0"

# Loaded when first used, so that the command line answers at once.
_LAZY = {
    "ImageModel": "cspd_jax.models",
    "load": "cspd_jax.models",
    "load_vae": "cspd_jax.models",
    "Info": "cspd_jax.image.generation",
    "generate": "cspd_jax.image.generation",
    "stream": "cspd_jax.image.generation",
    "to_images": "cspd_jax.image.generation",
    "to_latents": "cspd_jax.image.generation",
    "picture": "cspd_jax.reports",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__():
    return sorted({*globals(), *_LAZY})
