import jax
import pytest

# Parity with recorded numbers is checked on the code that users run. Elsewhere nearly all the time would go
# into compiling small programs that run once.
OPTIMISED = {"test_golden_mar", "test_autoencoder", "test_parity_torch", "test_lm_parity"}


@pytest.fixture(autouse=True)
def _compiler(request):
    """On a GPU float32 products default to TF32; numbers are compared at full precision."""
    before = jax.config.read("jax_disable_most_optimizations")
    optimised = request.module.__name__ in OPTIMISED
    jax.config.update("jax_disable_most_optimizations", before or not optimised)
    with jax.default_matmul_precision("highest"):
        yield
    jax.config.update("jax_disable_most_optimizations", before)
