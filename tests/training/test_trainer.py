"""Training runs: exactly resumable, the optimiser and its schedules, several devices,
the command."""

import dataclasses
import functools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from unittest import mock

import chex
import pytest
from commands import run
from training_run import TINY, trained

from cspd_jax.check import UserError
from cspd_jax.training import presets
from cspd_jax.training.config import data_from_json, to_json
from cspd_jax.training.data import glyphs
from cspd_jax.training.data.folder import Folder
from cspd_jax.training.data.glyphs import Glyphs
from cspd_jax.training.data.text import Texts
from cspd_jax.training.recipes import check_fit
from cspd_jax.training.run import begin, learning_rate

HERE = pathlib.Path(__file__).parents[1]


def logged(out, name):
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)[name] for line in lines]


def start(out, **environment):
    """Trains in a process of its own; all of them share what they compile."""
    environment |= {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_COMPILATION_CACHE_DIR": str(out.parent / "compiled"),
    }
    return subprocess.Popen(
        [sys.executable, HERE / "support/training_run.py", out],
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def strike(out, step, number):
    """Runs in a process of its own, which gets a signal after `step` steps."""
    process = start(out)
    try:
        while len(logged(out, "step")) < step:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        process.send_signal(number)
        if number == signal.SIGTERM:
            # As timeout(1) does, to the process and to its group.
            process.send_signal(number)
        _, told = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == -number, told
    return told


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and the final state of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    return out, trained(out)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_continues_bit_for_bit(tmp_path, whole, number):
    """Twice, at any moment; SIGTERM is told what it saved."""
    moments = random.Random(number)
    for step in (moments.randrange(3, 12), moments.randrange(14, 30)):
        told = strike(tmp_path, step, number)
        assert ("the same command goes on" in told) == (number == signal.SIGTERM)
    chex.assert_trees_all_equal(trained(tmp_path), whole[1])
    assert logged(tmp_path, "step") == list(range(1, TINY.steps + 1))
    assert logged(tmp_path, "loss") == logged(whole[0], "loss")
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {str(TINY.steps - TINY.checkpoint_every), str(TINY.steps)}


@pytest.mark.slow
def test_negative_control_one_lost_step_is_noticed(tmp_path, whole):
    """The comparison of resumed runs would see a single batch of another seed."""

    class Forgetful(Glyphs):
        def batch(self, index, size, *, seed=0, split="train"):
            return super().batch(index, size, seed=seed + (index == 30), split=split)

    with pytest.raises(AssertionError):
        forgetful = dataclasses.replace(TINY, data=Forgetful(fonts=("cmr10",), size=8))
        chex.assert_trees_all_equal(trained(tmp_path, forgetful), whole[1])


@pytest.mark.slow
def test_four_devices_give_the_same_run(tmp_path, whole):
    """Same batches and noise; only the order of additions differs."""
    flags = (
        "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    )
    process = start(tmp_path, XLA_FLAGS=flags)
    assert process.wait(300) == 0, process.stderr.read()
    process.communicate()
    chex.assert_trees_all_close(
        logged(tmp_path, "loss")[:5], logged(whole[0], "loss")[:5], rtol=1e-4
    )


def test_a_folder_holds_one_run(tmp_path):
    one = functools.partial(begin, tmp_path / "runs" / "one", command="train")
    one(TINY, init=None)
    one(TINY, init=None)
    for changes, init, said in (
        ({"seed": 1}, None, "was begun with another seed; repeat its command"),
        ({"steps": 900}, None, r"another steps; .*: --init .*/model"),
        ({}, "default", "was begun with another begun with"),
    ):
        with pytest.raises(UserError, match=said):
            one(dataclasses.replace(TINY, **changes), init=init)
    with pytest.raises(UserError, match="exists already"):
        begin(tmp_path, TINY)


def test_a_missing_package_is_said_before_anything_is_made(
    tmp_path, monkeypatch, capsys
):
    missing = ModuleNotFoundError(name="scipy")
    monkeypatch.setattr(glyphs, "distance_fields", mock.Mock(side_effect=missing))
    assert run(f"distill --out {tmp_path}/run") == 2
    assert 'pip install ".[train]"' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_learning_rate():
    rate = learning_rate(dataclasses.replace(TINY, warmup=10, decay=20, steps=60))
    found = [rate(step) / TINY.learning_rate for step in (0, 9, 10, 40, 50, 60)]
    assert found == pytest.approx([0.1, 1, 1, 1, 0.51, 0.02], rel=1e-5)


@pytest.mark.quick("glyphs")
@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets(name):
    """They can be compiled for, their data is read from JSON again, and their models
    fit it."""
    config = presets.preset(name)
    hash(config)
    assert data_from_json(json.loads(json.dumps(to_json(config)))) == config.data
    if not isinstance(config.data, Folder | Texts):
        check_fit(config)
