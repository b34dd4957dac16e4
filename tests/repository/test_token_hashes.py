"""The tokens of every method at fixed keys are those recorded: a change of structure changes none.

The cases with a MAR network are left to `python tests/token_hashes.py`: MAR's embedding of time is in
float32, as published, and differs in its last digits from one compiler setting or processor to another.
"""

import pytest
import token_hashes

QUICK = (
    "image: plain, chains, no final noise",
    "image: self, groups, guided, prefill",
    "image: draft, path, far, guided",
    "image: draft, paper, Sigma = 1, unaligned, guided",
    "image: released, groups, guided (lossy)",
    "text: block, adaptive, confidence",
    "masked: ssd, sampled, guided",
)


@pytest.mark.quick(
    "image: plain, chains, no final noise",
    "image: self, groups, guided, prefill",
    "image: draft, paper, Sigma = 1, unaligned, guided",
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))
        for name in token_hashes.CASES
        if "MAR" not in name
    ],
)
def test_tokens_are_those_recorded(name):
    assert token_hashes.found(name) == token_hashes.recorded()[name]


@pytest.mark.slow
def test_every_case_is_recorded():
    assert token_hashes.recorded().keys() == token_hashes.CASES.keys() >= set(QUICK)


@pytest.mark.slow
def test_another_token_is_noticed():
    """The negative control: a number of the fourth decimal, an integer, a shape."""
    import numpy as np

    tokens = np.linspace(0, 1, 12).reshape(3, 4)
    found = token_hashes.fingerprint((tokens,))
    assert found == token_hashes.fingerprint((tokens + 1e-12,))
    assert found != token_hashes.fingerprint((tokens + np.eye(3, 4) * 1e-4,))
    assert found != token_hashes.fingerprint((tokens.reshape(4, 3),))
    assert token_hashes.fingerprint(([1, 2],)) != token_hashes.fingerprint(([1, 3],))
