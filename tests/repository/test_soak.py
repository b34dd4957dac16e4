"""A minute of each soak: see tests/soak.py."""

from __future__ import annotations

import importlib.util

import faults
import pytest
import soak

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _caches(tmp_path, monkeypatch):
    """What the soaks set for the processes that they start is undone; and they may keep their programs."""
    for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")
    faults.private_caches(tmp_path)


def test_samples_that_are_struck_again_and_again(tmp_path):
    run = soak.Sampling(tmp_path, runs=4, seed=1)
    run.run()
    print(run.table())
    assert run.problems == [] and run.counts["images"] == 239 and run.counts["starts"] >= 4


def test_a_lost_image_is_noticed(tmp_path):
    """The negative control: a folder that is compared with one of other images."""
    run = soak.Sampling(tmp_path, runs=1, seed=0, shards=2)
    for out, images in ((tmp_path / "whole", 5), (run.out, 3)):
        run.ended(run.start(out, images), (0,), "nothing")
    (run.out / "shards" / "00000.npz.1.partial").touch()
    run.compare(tmp_path / "whole")
    told = "\n".join(run.problems)
    assert "shards/00002.npz is not that" in told and "partial was left behind" in told


@pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="needs the extra demo (gradio)")
def test_the_service_for_half_a_minute(tmp_path):
    import soak_service

    run = soak_service.Service(tmp_path, 30, seed=1)
    run.run()
    print(run.table())
    grown = [problem for problem in run.problems if " grew by " in problem]  # it still compiles
    assert run.problems == grown and run.counts["image", "200, the right image"] > 0
