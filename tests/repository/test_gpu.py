"""What is measured on a GPU: how it is read, replayed and put onto the pages. That all of it runs is a row of
test_benchmarks.py."""

import json
import types
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_cases
    import gpu_checks
    import gpu_pages
    import gpu_profile

    return types.SimpleNamespace(cases=gpu_cases, checks=gpu_checks, pages=gpu_pages, profile=gpu_profile)


def test_the_pages_say_what_was_measured(gpu):
    """README.md and docs/benchmarks.md are as `gpu.py --pages` writes them."""
    for path, text in gpu.pages.pages(BENCHMARKS / "results" / "gpu.json").items():
        assert path.read_text() == text, path


def test_what_is_measured_takes_the_place_of_what_is_modelled(gpu, tmp_path):
    row = {
        "model": "mar-base", "what": "token", "batch": 1, "guided": False, "dtype": "bfloat16",
        "precision": None, "method": "plain", "options": "", "respacing": "ddim100", "num_iter": 256,
        "device": "NVIDIA H200", "jax": "0.11.2", "measured_seconds_per_token": 0.004,
    }  # fmt: skip
    both = {"method": "self+chains", "options": "gamma 8, M 32", "measured_seconds_per_token": 0.008}
    assert gpu.pages.modelled_of(row)["modelled_seconds_per_token"] > 0
    assert gpu.pages.modelled_of(row | {"batch": 3}) == {}
    file = tmp_path / "gpu.json"
    assert gpu.pages.faster(file, "chains, M 32").endswith("x faster (H100), modelled")
    file.write_text(json.dumps({"rows": [row, row | both, row | {"error": "failed"}]}))
    assert gpu.pages.faster(file, "self+chains, gamma 8, M 32") == "2.0x **slower** (H200), measured"
    assert gpu.pages.table(file).count("| mar-base") == 2


def test_chains_are_replayed_as_they_were_recorded(gpu):
    """Of 6 steps: one chain keeps 2 and then 0 of its drafts, and so on; the other one everything."""
    kept = np.array([[0, 0], [0, 0], [1, 0], [0, 0], [0, 0], [2, 5]])
    assert gpu.cases.calls_of(kept).tolist() == [3, 1]
    found = {"chains": {"m, M 3": kept.tolist()}, "rounds": {"4": [[7, 0], [3, 1]]}}
    accepted = gpu.cases.Accepted(found)
    assert accepted.chains("m", 3, 4).shape == (6, 4)
    assert accepted.blocks(4, 3).tolist() == [[7, 0], [3, 1], [7, 0]]


def test_what_is_replayed_is_recorded(gpu):
    """A call keeps no more drafts than steps are left, a round no more transitions than gamma tokens have."""
    found = json.loads(gpu.cases.RECORDED.read_text())
    for kept in found["chains"].values():
        assert np.all(np.array(kept) <= np.arange(len(kept))[:, None])
    for gamma, kept in found["rounds"].items():
        assert np.max(kept) <= 100 * int(gamma)
    assert 0 < found["text"] < 1


def test_what_differs_from_a_cpu_is_seen(gpu):
    random = np.random.default_rng(0)
    one, other = random.standard_normal((2, 16, 8, 4))
    assert gpu.checks.same_moments(one, other)["as_on_a_cpu"]
    assert not gpu.checks.same_moments(one, other + 1)["as_on_a_cpu"]
    assert not gpu.checks.same_moments(one, 2 * other)["as_on_a_cpu"]
    assert gpu.checks.alike(one, one + 1e-4)["as_on_a_cpu"]
    assert not gpu.checks.alike(one, other)["as_on_a_cpu"]
    assert not gpu.checks.alike(np.array([1, 2]), np.array([1, 3]))["as_on_a_cpu"]
