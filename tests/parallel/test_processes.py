"""Two processes as one program: the same results as one, and none waits for one that
failed."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys

import chex
import numpy as np
import pytest
from test_trainer import logged

pytestmark = pytest.mark.slow
GENERATE = shlex.split(
    "generate --target default --method plain --labels 0-3 --n 1 --num-iter 4"
    " --respacing ddim10"
)
TEXT = shlex.split("text --prompt import --prompt The --new-tokens 24 --json")
SETTINGS = shlex.split(
    "model.seq_len=4 model.buffer_size=2 model.encoder_width=16 model.encoder_depth=1"
    " model.encoder_heads=2 model.decoder_width=16 model.decoder_depth=1"
    " model.decoder_heads=2 model.head_depth=1 model.head_width=16"
    " model.respacing=ddim10 data.size=8 data.fonts=cmr10 copies=2 buckets=1"
    " log_every=1 checkpoint_every=3 warmup=2 decay=2 steps=6 batch=8"
)
TRAIN = [
    "train",
    "--preset",
    "glyphs-draft",
    *(f"--set={setting}" for setting in SETTINGS),
]


def start(*arguments):
    # Nearly all the time goes into compiling programs that run once.
    environment = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
    return subprocess.Popen(
        [sys.executable, "-m", "cspd_jax", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def ended(processes):
    """Returns (out, told, code) of each."""
    return [
        (*process.communicate(timeout=600), process.returncode) for process in processes
    ]


def both(first, second=None):
    """Two processes with these arguments, which are the same for both without
    others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    commands = enumerate((first, second or first))
    return ended(
        [
            start("--distributed", f"127.0.0.1:{port},{i},2", *arguments)
            for i, arguments in commands
        ]
    )


def alone(*arguments):
    ((out, told, code),) = ended([start(*arguments)])
    assert code == 0, told
    return out


def test_generate(tmp_path):
    (out, told, code), (silent, _, other) = both([*GENERATE, "--out", tmp_path / "two"])
    assert (code, other) == (0, 0), told
    assert out.strip() == str(tmp_path / "two") and silent == ""
    alone(*GENERATE, "--out", tmp_path / "one")
    one, two = (np.load(tmp_path / name / "samples.npz") for name in ("one", "two"))
    # float32, batches of 4 and of 2
    chex.assert_trees_all_close(two["tokens"], one["tokens"], atol=1e-4)
    assert (one["labels"] == two["labels"]).all()


def test_text():
    (out, told, code), _ = both(TEXT)
    assert code == 0, told
    assert json.loads(out)["ids"] == json.loads(alone(*TEXT))["ids"]


def test_train_and_go_on(tmp_path):
    for _ in range(2):
        (_, told, code), _ = both([*TRAIN, "--out", tmp_path / "two"])
        assert code == 0, told
        # As if they had been stopped after step 3.
        for later in ("checkpoints/6", "model"):
            assert (tmp_path / "two" / later).exists()
            shutil.rmtree(tmp_path / "two" / later)
    alone(*TRAIN, "--out", tmp_path / "one")
    one, two = (np.array(logged(tmp_path / name, "loss")) for name in ("one", "two"))
    chex.assert_shape(one, (6,))
    chex.assert_trees_all_close(two, one, rtol=1e-4)


@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_fails_ends_the_other(tmp_path, failing):
    """The runtime sees that it is gone; nobody waits for ever, and nothing is
    written."""
    right = [*GENERATE, "--out", tmp_path / "a"]
    commands = [right, right]
    commands[failing] = [*right, "--target", tmp_path / "no"]
    found = both(*commands)
    sentences = [line for line in found[failing][1].splitlines() if "cspd-jax" in line]
    assert found[failing][2] == 2 and len(sentences) == 1
    assert found[1 - failing][2] != 0 and not (tmp_path / "a").exists()
