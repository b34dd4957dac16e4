import jax
import pytest


@pytest.fixture(autouse=True)
def _exact_matmuls():
    """On a GPU float32 products default to TF32; numbers are compared at full precision."""
    with jax.default_matmul_precision("highest"):
        yield
