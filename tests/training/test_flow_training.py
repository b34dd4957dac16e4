"""Causal models are trained by a command, resumed bit for bit, and sampled."""

import json

import jax
import numpy as np
import pytest

from cspd_jax.__main__ import main
from cspd_jax.training import presets, settings
from cspd_jax.training.config import FlowTrainConfig
from cspd_jax.weights import models

MODEL = {"width": 16, "depth": 1, "heads": 2, "class_tokens": 2, "head_width": 16, "head_depth": 1}
MODEL |= {"respacing": "flow4", "seq_len": 16}
RUN = {"batch": 4, "log_every": 1, "checkpoint_every": 2, "sample_every": 2, "warmup": 0, "decay": 0}
TINY = [f"model.{name}={value}" for name, value in MODEL.items()]
TINY += [f"{name}={value}" for name, value in {**RUN, "data.size": 16, "data.extent": 12}.items()]


def train(out, *argv):
    options = [part for setting in TINY for part in ("--set", setting)]
    if "--resume" in argv:
        options = []
    assert main(["train", "--preset", "glyphs-causal", "--out", str(out), *options, *argv]) == 0


def test_settings_as_json():
    for name in ("glyphs-causal", "glyphs-causal-draft"):
        config = presets.preset(name)
        assert isinstance(config, FlowTrainConfig)
        assert settings.from_json(json.loads(json.dumps(settings.to_json(config)))) == config


@pytest.mark.slow
def test_train_resume_and_sample(tmp_path, capsys):
    train(tmp_path / "whole", "--steps", "4")
    train(tmp_path / "parts", "--steps", "4", "--stop-at", "2")
    train(tmp_path / "parts", "--resume")
    whole, parts = (models.load(tmp_path / name / "model") for name in ("whole", "parts"))
    jax.tree.map(np.testing.assert_array_equal, whole.params, parts.params)
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 4 and np.isfinite(json.loads(lines[-1])["loss"])
    assert (tmp_path / "whole" / "pictures" / "step_0000004.png").exists()
    argv = ["sample", "--target", str(tmp_path / "whole" / "model"), "--out", str(tmp_path / "images")]
    assert main([*argv, "--n", "4", "--batch", "2", "--denoise", "plain", "--png"]) == 0
    assert len(list((tmp_path / "images" / "png").glob("*.png"))) == 4
