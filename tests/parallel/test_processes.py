"""Two processes as one program: the same results as one, and none waits for one that failed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.slow
GENERATE = (
    "generate",
    "--target",
    "default",
    "--method",
    "plain",
    "--labels",
    "0-3",
    "--n",
    "1",
    "--num-iter",
    "4",
    "--steps",
    "ddim10",
)
TRAIN = (
    "train", "--preset", "digits", "--set", "model.seq_len=4", "--set", "model.buffer_size=2",
    "--set", "model.encoder_width=16", "--set", "model.encoder_depth=1", "--set", "model.encoder_heads=2",
    "--set", "model.decoder_width=16", "--set", "model.decoder_depth=1", "--set", "model.decoder_heads=2",
    "--set", "model.head_depth=1", "--set", "model.head_width=16", "--set", "model.respacing=ddim10",
    "--set", "data.size=8", "--set", "copies=2", "--set", "buckets=1", "--set", "log_every=1",
    "--set", "checkpoint_every=3", "--set", "warmup=2", "--set", "decay=2",
    "--set", "steps=6", "--set", "batch=8",
)  # fmt: skip


# Nearly all the time goes into compiling programs that run once.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}


def command(*arguments):
    return [sys.executable, "-m", "cspd_jax", *map(str, arguments)]


def start(port, index, *arguments):
    where = f"127.0.0.1:{port},{index},2"
    return subprocess.Popen(
        command("--distributed", where, *arguments),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def both(*arguments):
    port = free_port()
    processes = [start(port, index, *arguments) for index in (0, 1)]
    return [(*process.communicate(timeout=600), process.returncode) for process in processes]


def alone(*arguments):
    environment = {**os.environ, **ENVIRONMENT}
    subprocess.run(command(*arguments), check=True, capture_output=True, timeout=600, env=environment)


def sentences(told):
    return [line for line in told.splitlines() if "cspd-jax" in line]


def test_generate(tmp_path):
    (out, told, code), (silent, _, other) = both(*GENERATE, "--out", tmp_path / "two")
    assert (code, other) == (0, 0), told
    assert out.strip() == str(tmp_path / "two") and silent == ""
    alone(*GENERATE, "--out", tmp_path / "one")
    one, two = (np.load(tmp_path / name / "samples.npz") for name in ("one", "two"))
    np.testing.assert_allclose(two["tokens"], one["tokens"], atol=1e-4)  # float32, batches of 4 and of 2
    assert (one["labels"] == two["labels"]).all()


def test_text():
    (out, told, code), _ = both(
        "text", "--prompt", "import", "--prompt", "The", "--new-tokens", "24", "--json"
    )
    assert code == 0, told
    single = subprocess.run(
        command("text", "--prompt", "import", "--prompt", "The", "--new-tokens", "24", "--json"),
        check=True, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert json.loads(out)["ids"] == json.loads(single.stdout)["ids"]


def test_train_and_go_on(tmp_path):
    (_, told, code), _ = both(*TRAIN, "--out", tmp_path / "two")
    assert code == 0, told
    for later in ("checkpoints/6", "model"):  # as if they had been stopped after step 3
        shutil.rmtree(tmp_path / "two" / later)
    (_, told, code), _ = both(*TRAIN, "--out", tmp_path / "two")
    assert code == 0, told
    alone(*TRAIN, "--out", tmp_path / "one")
    assert_same_losses(tmp_path)
    assert (tmp_path / "two" / "model" / "config.json").exists()


def assert_same_losses(folder):
    """Of the runs `one` and `two`, of 6 steps."""
    losses = [
        [json.loads(line)["loss"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    assert len(losses[0]) == 6
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_fails_ends_the_other(tmp_path, failing):
    """The runtime sees that it is gone; nobody waits for ever, and nothing is written."""
    port = free_port()
    processes = [
        start(port, i, *GENERATE, *(("--target", tmp_path / "no") * (i == failing)), "--out", tmp_path / "a")
        for i in (0, 1)
    ]
    told = [process.communicate(timeout=200)[1] for process in processes]
    assert processes[failing].returncode == 2 and len(sentences(told[failing])) == 1
    assert processes[1 - failing].returncode != 0
    assert not (tmp_path / "a").exists()
