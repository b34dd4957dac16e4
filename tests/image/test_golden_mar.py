"""Parity with the recorded numbers of the public PyTorch implementation, submodule by
submodule."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from golden_cases import GOLDEN, GROUPS, fixture
from recorded import check


# Whole generations compile a program for each recorded setting.
@pytest.mark.quick("mar_tiny_patch2-backbone")
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", ["mar_tiny", "mar_tiny_patch2"])
def test_parity(name, group):
    check(GROUPS[group](fixture(GOLDEN, name)))


@pytest.mark.slow
def test_optimised_code(tmp_path):
    """The same groups of one model, and those of the runner, in a process that compiles
    as users do."""
    for file in [*GOLDEN.glob("mar_tiny_patch2*"), *GOLDEN.glob("cspd_*")]:
        (tmp_path / file.name).symlink_to(file)
    command = [sys.executable, Path(__file__).parents[1] / "golden_cases.py", tmp_path]
    ours = ("XLA_FLAGS", "CSPD_JAX_TESTS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {
        name: value for name, value in os.environ.items() if name not in ours
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mar_tiny_patch2" in done.stdout and "runner" in done.stdout
