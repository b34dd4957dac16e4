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
    import accepted
    import cases
    import kernels
    import pages

    return types.SimpleNamespace(accepted=accepted, cases=cases, pages=pages, kernels=kernels)


def test_the_pages_say_what_was_measured_and_counted(gpu):
    """README.md and docs/benchmarks.md are as `gpu.py --pages` writes them."""
    measured, counted = gpu.pages.rows_of(gpu.pages.MEASURED), gpu.pages.rows_of(gpu.pages.COUNTED)
    for path, text in gpu.pages.pages(measured, counted).items():
        assert path.read_text() == text, path


def test_what_is_replayed_is_counted(gpu):
    """Of 6 steps, one chain keeps 2 and then 0 of its drafts, and so on; the other one everything. Of two
    images, one makes 2 tokens, then 1; the other one 1, then 3, and its paths go on."""
    kept = np.array([[0, 0], [0, 0], [1, 0], [0, 0], [0, 0], [2, 5]])
    assert gpu.accepted.calls_of(kept, np.array([6, 6]), [2, 1]) == {2: 1, 1: 2}
    assert gpu.accepted.chains_of(kept, 4, 6, 6).shape == (6, 4)
    images = [[[6, 1], [0, 6]], [[3, 0], [6, 6]]]
    blocks = gpu.accepted.table_of(images, 2, 6)
    assert blocks[0, :4].tolist() == [[6, 1], [0, 0], [0, 6], [6, 1]]
    chains = np.full((6, 6), 4)  # a call makes five steps
    dropped, coupled = (gpu.accepted.run_of(blocks, chains, 3, [6, 3], how) for how in (False, True))
    assert dropped == (2, 3.5, {6: 2.0, 3: 0.0}) and coupled == (2, 3.5, {6: 1.5, 3: 0.5})


@pytest.mark.slow
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
