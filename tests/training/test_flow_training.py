"""Causal models are trained by a command, and sampled."""

import json

import numpy as np
import pytest

from cspd_jax.__main__ import main

MODEL = {"width": 16, "depth": 1, "heads": 2, "class_tokens": 2, "head_width": 16, "head_depth": 1}
MODEL |= {"respacing": "flow4", "seq_len": 16}
RUN = {"batch": 4, "log_every": 1, "sample_every": 2, "warmup": 0, "decay": 0}
TINY = [f"model.{name}={value}" for name, value in MODEL.items()]
TINY += [f"{name}={value}" for name, value in {**RUN, "data.size": 16}.items()]


@pytest.mark.slow
def test_train_and_sample(tmp_path):
    options = [part for setting in TINY for part in ("--set", setting)]
    out = tmp_path / "run"
    assert main(["train", "--preset", "glyphs-causal", "--out", str(out), "--steps", "4", *options]) == 0
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 4 and np.isfinite(json.loads(lines[-1])["loss"])
    assert (out / "pictures" / "step_0000004.png").exists()
    argv = ["sample", "--target", str(out / "model"), "--out", str(tmp_path / "images")]
    assert main([*argv, "--n", "4", "--batch", "2", "--denoise", "plain"]) == 0
    assert len(list((tmp_path / "images" / "shards").iterdir())) == 2
