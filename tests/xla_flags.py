"""Flags of XLA under which tests take the least time."""

from __future__ import annotations

import os
import subprocess
import sys

# Nearly all the time goes into compiling programs that run once, and the newer way of compiling loops for
# CPUs takes three times as long. `python tests/golden_cases.py FOLDER` checks the code that it makes.
_QUICK = "--xla_cpu_use_fusion_emitters=false"
# Tests run side by side, one in each process: threads of one would be in the way of the others.
_ALONE = "--xla_cpu_multi_thread_eigen=false"
_DECIDED = "CSPD_JAX_TESTS"  # in the environment of the processes that tests start


def for_tests(worker: bool) -> str:
    """XLA_FLAGS of this process; `worker` if others run tests beside it."""
    flags = [os.environ.get("XLA_FLAGS", "")]
    if _DECIDED not in os.environ:
        os.environ[_DECIDED] = "1"
        flags += [_QUICK] * _is_known(_QUICK)
    return " ".join([*flags, *[_ALONE] * worker])


def _is_known(flag: str) -> bool:
    """A flag that jaxlib does not know ends the process."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(command, env=environment, stderr=subprocess.DEVNULL).returncode == 0
