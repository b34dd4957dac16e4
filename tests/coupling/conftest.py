import jax
import pytest


@pytest.fixture(autouse=True)
def _equal_ranks():
    """Here no array is broadcast to another rank in silence."""
    with jax.numpy_rank_promotion("raise"):
        yield
