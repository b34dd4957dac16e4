"""What is measured on a GPU and counted without one: how it is replayed, and put onto the pages."""

import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import cases
    import kernels
    import pages

    return types.SimpleNamespace(cases=cases, pages=pages, kernels=kernels)


def test_the_pages_say_what_was_measured_and_counted(gpu):
    """README.md and docs/benchmarks.md are as `gpu.py --pages` writes them."""
    measured, counted = gpu.pages.rows_of(gpu.pages.MEASURED), gpu.pages.rows_of(gpu.pages.COUNTED)
    for path, text in gpu.pages.pages(measured, counted).items():
        assert path.read_text() == text, path


def test_what_is_replayed_is_counted(gpu):
    """Of 6 steps, one chain keeps 2 and then 0 of its drafts, and so on; the other one everything. Of two
    images, with 5 steps, one makes 2 tokens and then 1, the other one 1 and then 3."""
    kept = np.array([[0, 0], [0, 0], [1, 0], [0, 0], [0, 0], [2, 5]])
    assert gpu.cases.calls_of(kept).tolist() == [3, 1]
    assert gpu.cases.chains_of(kept, 4).shape == (6, 4)
    assert gpu.cases.rounds_of(np.array([[7, 0, 0], [3, 14, 0]]), 5, 3) == (2, 3.5)


def test_programs_accept_what_is_replayed(gpu):
    """A run makes the tokens that its row is divided by."""
    case = gpu.cases.image_case("mar-base", gpu.cases.Scale(toy=True), 16, 4, batch=2)
    _, made = jax.jit(case.function)(*case.real_args())
    assert np.mean(made) == case.tokens


def test_kernels_of_loops_are_added_up(gpu):
    """A loop of 3 trips that the compiler knows, in one that ends when the data say so."""

    def run(x):
        inner = lambda x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x), x)
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, inner, x)

    text = jax.jit(run).lower(jnp.ones(8)).compile().as_text()
    few, many = (gpu.kernels.count_launches(text, [trips], {}) for trips in (1.0, 5.0))
    assert (few.reads, many.reads) == (2, 6)
    assert many.kernels - few.kernels >= 4 * 3
