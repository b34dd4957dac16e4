"""Two processes as one program: the same results as one, and none waits for one that failed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

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
    "--set", "checkpoint_every=3", "--set", "sample_every=0", "--set", "warmup=2", "--set", "decay=2",
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
    (out, told, code), (silent, quiet, other) = both(*GENERATE, "--out", tmp_path / "two")
    assert (code, other) == (0, 0), told
    assert out.strip() == str(tmp_path / "two") and silent == quiet == ""
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


def test_train_and_resume(tmp_path):
    (_, told, code), _ = both(*TRAIN, "--out", tmp_path / "two", "--stop-at", "3")
    assert code == 0, told
    (_, told, code), _ = both(*TRAIN, "--out", tmp_path / "two", "--resume")
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


def test_distill(tmp_path):
    """On the data and on samples that the target makes once."""
    alone(*TRAIN, "--out", tmp_path / "target")
    target = tmp_path / "target" / "model"
    distill = ("distill", *TRAIN[1:], "--target", target, "--from", "both", "--samples", "64", "--json")
    (out, told, code), (silent, _, other) = both(*distill, "--out", tmp_path / "two")
    assert (code, other) == (0, 0), told
    alone(*distill, "--out", tmp_path / "one")
    assert_same_losses(tmp_path)
    assert 0 < json.loads(out)["path_acceptance"] <= 1 and silent == ""


def test_each_reads_the_files_of_its_rows(tmp_path):
    """Streamed by two processes, the images of a folder train as if one process kept them all."""
    random = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(9):
            pixels = random.integers(0, 256, (8, 8), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
    folder = (*TRAIN, "--preset", "mar-base", "--data", tmp_path / "images")
    for setting in ("seq_len=4", "patch_size=4", "vae_stride=1", "num_classes=2"):
        folder += ("--set", f"model.{setting}")
    folder += ("--set", "data.channels=1", "--set", "data.flip=true")
    (_, told, code), _ = both(*folder, "--stream", "--out", tmp_path / "two")
    assert code == 0, told
    alone(*folder, "--out", tmp_path / "one")
    assert_same_losses(tmp_path)


def test_one_that_fails_ends_the_other(tmp_path):
    port = free_port()
    first = start(port, 0, *GENERATE, "--out", tmp_path / "a")
    second = start(port, 1, *GENERATE, "--target", tmp_path / "nothing", "--out", tmp_path / "a")
    _, told = first.communicate(timeout=120)
    assert second.wait(60) == first.returncode == 2
    assert len(sentences(told)) == 1 and "process 1: " in told and "nothing" in told
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("killed", [0, 1])
def test_one_that_is_killed_ends_the_other(tmp_path, killed):
    port = free_port()
    processes = [start(port, i, *TRAIN, "--set", "steps=100000", "--out", tmp_path / "a") for i in (0, 1)]
    metrics, until = tmp_path / "a" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
        assert time.monotonic() < until and all(p.poll() is None for p in processes)
        time.sleep(0.1)
    processes[killed].send_signal(signal.SIGKILL)
    left = processes[1 - killed]
    _, told = left.communicate(timeout=60)
    assert left.returncode not in (0, None)
    if killed == 1:  # without the first process nobody speaks
        assert len(sentences(told)) == 1 and "Traceback" not in told


def test_one_that_waits_in_vain():
    code = "from cspd_jax.parallel import processes; processes.initialize({!r}, patience=3)"
    for index in (0, 1):
        where = f"127.0.0.1:{free_port()},{index},2"
        process = subprocess.run(
            [sys.executable, "-c", code.format(where)], capture_output=True, text=True, timeout=120,
            env={**os.environ, **ENVIRONMENT},
        )  # fmt: skip
        assert process.returncode == 2
        assert len(sentences(process.stderr)) == 1 and "did not meet within 3 s" in process.stderr


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_that_waits_can_be_ended(number, code):
    where = f"127.0.0.1:{free_port()},1,2"
    process = subprocess.Popen(
        [sys.executable, "-m", "cspd_jax", "--distributed", where, "text", "--prompt", "a"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    assert process.stderr.readline() == "waiting for the other processes, for up to 120 s\n"
    process.send_signal(number)
    begun = time.monotonic()
    _, told = process.communicate(timeout=60)
    assert (process.returncode, time.monotonic() - begun < 10) == (code, True)
    assert "Traceback" not in told


def test_where_the_others_are(capsys):
    from cspd_jax.apps.cli import main

    for where in (
        "here",
        "host:1",
        "host:1,2",
        "host:1,2,2",
        "host:x,0,2",
        ",0,2",
        "host:0,0,2",
        "host:99999,0,2",
    ):
        assert main(["--distributed", where, "info", "default"]) == 2
        assert "--distributed" in capsys.readouterr().err
