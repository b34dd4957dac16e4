"""Several processes, on one host or many, as one program on all their devices.

JAX's runtime connects them, and ends the others where one is gone. Every process runs the same program; the
first one speaks and writes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

from cspd_jax.errors import UserError, shown

_SILENCE = 10  # seconds after which a process that says nothing is gone


def initialize(where: str) -> None:
    """Connects this process to the others, before any device is used.

    where: "auto" finds them as jax.distributed does (SLURM, Open MPI, Cloud TPU, Kubernetes, or the variables
        JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID); or HOST:PORT,I,N: process I of N, the
        first of which can be reached at HOST:PORT.
    """
    given = {} if where == "auto" else _parse(where)
    try:
        jax.distributed.initialize(**given, heartbeat_timeout_seconds=_SILENCE)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the processes cannot be connected ({' '.join(str(error).split())[:200]}); give --distributed"
            " HOST:PORT,I,N to each of them"
        ) from None
    if is_first():  # what the runtime prints does not belong to the results
        sys.stdout = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    else:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _parse(where: str) -> dict[str, Any]:
    try:
        address, index, count = where.split(",")
        return {"coordinator_address": address, "process_id": int(index), "num_processes": int(count)}
    except ValueError:
        raise UserError(
            f"--distributed is {shown(where)}; it must be auto, or HOST:PORT,I,N for process I (from 0) of N"
        ) from None


def is_alone() -> bool:
    """Returns whether this is the only process."""
    return jax.process_count() == 1


def is_first() -> bool:
    """Returns whether this is the process that speaks and writes."""
    return jax.process_index() == 0


def meet(where: str) -> None:
    """Waits until all processes are here."""
    if not is_alone():
        multihost_utils.sync_global_devices(where)


@contextlib.contextmanager
def first_alone(what: str) -> Iterator[None]:
    """Has the first process run the block before the others do, who then find on disk what it left there."""
    if not is_first():
        meet(what)
    yield
    if is_first():
        meet(what)
