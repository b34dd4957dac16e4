import os
import pathlib

import xla_flags

# The commands turn on JAX's cache on disk; tests neither read what other runs left there nor write into it.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

os.environ["XLA_FLAGS"] = xla_flags.for_tests(worker="PYTEST_XDIST_WORKER" in os.environ)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest

# Parity of MAR and of the default models with recorded numbers is checked on optimised code. Elsewhere nearly
# all the time would go into compiling small programs that run once.
OPTIMISED = {
    "test_golden_mar",
    "test_chain_speculation_default",
    "test_parity_torch",
    "test_same_law",
}


@pytest.fixture(scope="module", autouse=True)
def _compiler(request):
    """For the tests of a module and its fixtures. On a GPU float32 products default to TF32; numbers are
    compared at full precision."""
    before = jax.config.read("jax_disable_most_optimizations")
    optimised = request.module.__name__ in OPTIMISED
    jax.config.update("jax_disable_most_optimizations", before or not optimised)
    with jax.default_matmul_precision("highest"):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Every compiled program holds memory maps, of which Linux allows a process 65530."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 10_000:
        jax.clear_caches()


@pytest.fixture
def float64():
    """Greedy claims are of token equality: rounding must have no say."""
    with jax.enable_x64(True):
        yield
