"""Meshes: the same tokens and counts whatever shares the work; parameters that no
device holds whole."""

import json
import os
import pathlib
import subprocess
import sys

import chex
import numpy as np
import pytest
import text_models
from jax.sharding import PartitionSpec
from mesh_cases import MESHES

from cspd_jax.parallel import partition

CASES = [(sizes, name) for sizes, names in MESHES.items() for name in names]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Made in a process that has eight devices, which checks bits and places too."""
    folder = tmp_path_factory.mktemp("mesh")
    program = pathlib.Path(__file__).parents[1] / "support/mesh_cases.py"
    command = [sys.executable, program, folder]
    environment = {
        # Without QUICK of conftest.py: with it, bits depend on how rows are shared.
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    subprocess.run(command, check=True, timeout=2400, env=os.environ | environment)
    return json.loads((folder / "results.json").read_text())


def check(results, sizes, name):
    alone = results[f"{name}; none"]
    spread = results[f"{name}; {sizes}"]
    chex.assert_trees_all_close(
        *(np.array(one["tokens"]) for one in (spread, alone)), rtol=0, atol=1e-10
    )
    assert all(spread[what] == alone[what] for what in ("accepted", "tested", "chains"))
    for few, all_ in zip(spread["sequential"], alone["sequential"]):
        assert 0 <= few <= all_  # a group waits for its own rows alone


@pytest.mark.slow
@pytest.mark.parametrize("sizes, name", CASES)
def test_same_tokens_on_a_mesh(results, sizes, name):
    check(results, sizes, name)


@pytest.mark.slow
def test_some_drafts_are_accepted_and_the_comparison_can_fail(results):
    sizes = "data=4,model=2"
    name = "text, google, model"
    spread = results[f"{name}; {sizes}"]
    chains = results[f"trained; {sizes}"]["chains"]
    for tested, accepted in (chains, (spread["tested"], spread["accepted"])):
        assert 0 < np.sum(accepted) < np.sum(tested)
    spread["tokens"][0][0] += 1
    with pytest.raises(AssertionError):
        check(results, sizes, name)


def test_heads_are_cut_only_if_their_number_can_be():
    config = text_models.CONFIG  # two heads of keys
    of = lambda devices: partition("attention/k/kernel", (16, 8), devices, config)
    assert of(2) == PartitionSpec(None, "model")
    assert of(4) == PartitionSpec("model")
