"""Parity with the recorded numbers of the public PyTorch implementation, submodule by submodule."""

import pytest
from golden_cases import GOLDEN, GROUPS, fixture

# Whole generations compile a program for each recorded setting. What the second model has of its own, another
# token dimension, shows in the quick groups too.
SLOW = {("mar_tiny", "generations (well conditioned)")}
SLOW |= {("mar_tiny_patch2", group) for group in GROUPS if group.startswith(("generations", "chains"))}


@pytest.mark.parametrize(
    "name, group",
    [
        pytest.param(name, group, marks=[pytest.mark.slow] * ((name, group) in SLOW))
        for name in ("mar_tiny", "mar_tiny_patch2")
        for group in GROUPS
    ],
)
def test_parity(name, group):
    cases = list(GROUPS[group](fixture(GOLDEN, name)))
    assert cases
    bad = [f"{what}: {error:.2e} > {bound:.2e}" for what, error, bound in cases if not error <= bound]
    assert not bad, "\n".join(bad)
