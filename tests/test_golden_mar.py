"""Parity with the recorded numbers of the public PyTorch implementation, submodule by submodule."""

import pytest
from golden_cases import GOLDEN, GROUPS, fixture


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", ["mar_tiny", "mar_tiny_patch2"])
def test_parity(name, group):
    cases = list(GROUPS[group](fixture(GOLDEN, name)))
    assert cases
    bad = [f"{what}: {error:.2e} > {bound:.2e}" for what, error, bound in cases if not error <= bound]
    assert not bad, "\n".join(bad)
