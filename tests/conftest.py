import os

# The commands turn on JAX's cache on disk; tests neither read what other runs left there nor write into it.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

# Tests run side by side, one in each process: threads of one would be in the way of the others.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest

# Parity with recorded numbers is checked on the code that users run. Elsewhere nearly all the time would go
# into compiling small programs that run once.
OPTIMISED = {
    "test_autoencoder",
    "test_golden_mar",
    "test_inner_default",
    "test_lm_parity",
    "test_parity_torch",
    "test_same_law",
}


@pytest.fixture(autouse=True)
def _compiler(request):
    """On a GPU float32 products default to TF32; numbers are compared at full precision."""
    before = jax.config.read("jax_disable_most_optimizations")
    optimised = request.module.__name__ in OPTIMISED
    jax.config.update("jax_disable_most_optimizations", before or not optimised)
    with jax.default_matmul_precision("highest"):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Thousands of compiled programs in one process use up the memory maps that Linux allows it."""
    yield
    jax.clear_caches()
