"""Checkpoint folders, and published weights by name (`weights.hub`)."""

from cspd_jax.weights.folder import (
    DTYPES,
    FORMAT_VERSION,
    Checkpoint,
    check_destination,
    load,
    read_description,
    save,
)

__all__ = [
    "DTYPES",
    "FORMAT_VERSION",
    "Checkpoint",
    "check_destination",
    "load",
    "read_description",
    "save",
]
