"""Meshes: the same tokens and counts whatever shares the work; parameters that no device holds whole."""

from __future__ import annotations

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

from cspd_jax.parallel import partition

HERE = pathlib.Path(__file__).parents[1]
QUICK = {"data=2,model=2": ("trained", "text, google, model")}
# The other rows of the table differ from these in numbers.
EVERY_LOOP = (
    "plain", "plain, groups, guided, cold", "annealed checkerboard", "self", "self, groups, guided",
    "self, both levels", "self, coupled, both levels", "draft, adaptive, both levels",
    "paper, Sigma = 1, groups, guided, own noise", "released", "text, plain, top-k, top-p",
    "text, block, model, adapted", "text, match, model, adapted", "text, block, lookup", "text, block, head",
    "text, tree", "masked, ssd", "masked, ssd, Dream, cached, guided", "masked, stepwise, cached",
    "masked, schedule",
)  # fmt: skip


def on_meshes(folder, cases):
    """cases: mesh -> names."""
    out = folder / "results.json"
    runs = [f"{sizes}:{';'.join(names)}" for sizes, names in cases.items()]
    command = [sys.executable, str(HERE / "mesh_cases.py"), str(out), *runs]
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    subprocess.run(command, check=True, timeout=1800, env={**os.environ, **environment})
    return json.loads(out.read_text())


def check(results, cases):
    for sizes, case in ((sizes, case) for sizes, names in cases.items() for case in names):
        alone, spread = results[f"{case}; none"], results[f"{case}; {sizes}"]
        chex.assert_trees_all_close(*(np.array(one["tokens"]) for one in (spread, alone)), rtol=0, atol=1e-10)
        for name in ("accepted", "tested", "chains"):
            assert spread[name] == alone[name], (case, sizes, name)
        for few, all_ in zip(spread["sequential"], alone["sequential"]):
            assert 0 <= few <= all_, (case, sizes)  # a group waits for its own rows alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mesh")


@pytest.fixture(scope="module")
def quick(folder):
    return on_meshes(folder, QUICK)


@pytest.mark.slow
def test_same_tokens_on_a_mesh(quick):
    check(quick, QUICK)


@pytest.mark.slow
def test_some_drafts_are_accepted(quick):
    for case in QUICK["data=2,model=2"]:
        spread = quick[f"{case}; data=2,model=2"]
        totals = [np.sum(spread[name]) for name in ("tested", "accepted")]
        tested, accepted = totals if totals[0] else np.sum(spread["chains"], axis=1)
        assert 0 < accepted < tested, case


@pytest.mark.slow
def test_the_comparison_can_fail(quick):
    other = json.loads(json.dumps(quick))
    other["text, google, model; data=2,model=2"]["tokens"][0][0] += 1
    with pytest.raises(AssertionError):
        check(other, QUICK)


@pytest.mark.slow
def test_every_sampler_and_every_mesh(tmp_path):
    """Every loop of the library on a mesh of both axes; meshes of other proportions with some of each
    family."""
    cases = {
        "data=4,model=2": EVERY_LOOP,
        "data=8": ("text, greedy, model", "self"),
        "data=2,model=4": ("self, guided", "masked, ssd"),
    }
    check(on_meshes(tmp_path, cases), cases)


@pytest.mark.slow
def test_bits_and_places(tmp_path):
    """Restored and converted parameters lie where they belong; an image's bits are those of its own group."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / "mesh_bits.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=900, env={**os.environ, **flags})


@pytest.mark.parametrize(
    "path, shape, spec",
    [
        ("layers_0/attention/out/kernel", (16, 16), ("model",)),
        ("layers_0/mlp/down/kernel", (24, 16), ("model",)),
        ("embed/embedding", (11, 16), (None, "model")),
        ("head/res_blocks_0/mlp_0/kernel", (16, 16), (None, "model")),
        ("head/res_blocks_0/mlp_0/kernel", (16, 15), ()),  # cannot be shared out
    ],
)
def test_rules(path, shape, spec):
    assert partition(path, shape, 2) == PartitionSpec(*spec)
    assert partition(path, shape, 1) == PartitionSpec()


def test_heads_are_cut_only_if_their_number_can_be():
    config = text_models.CONFIG  # two heads of keys
    assert partition("attention/k/kernel", (16, 8), 2, config) == PartitionSpec(None, "model")
    assert partition("attention/k/kernel", (16, 8), 4, config) == PartitionSpec("model")
