"""The tokens of every method at fixed keys are those recorded: a change of structure
changes none.

The cases with a MAR network are left to `python tests/token_hashes.py`: MAR's embedding
of time is in float32, as published, and differs in its last digits from one compiler
setting or processor to another.
"""

import numpy as np
import pytest
import token_hashes


@pytest.mark.quick(
    "image: plain, chains, no final noise",
    "image: self, groups, guided, prefill",
)
@pytest.mark.parametrize(
    "name", [name for name in token_hashes.CASES if "MAR" not in name]
)
def test_tokens_are_those_recorded(name):
    assert token_hashes.found(name) == token_hashes.recorded()[name]


def test_every_case_is_recorded_and_another_token_is_noticed():
    """The negative control: a number of the fourth decimal, an integer, a shape."""
    assert token_hashes.recorded().keys() == token_hashes.CASES.keys()
    tokens = np.linspace(0, 1, 12).reshape(3, 4)
    found = token_hashes.fingerprint((tokens,))
    assert found == token_hashes.fingerprint((tokens + 1e-12,))
    assert found != token_hashes.fingerprint((tokens + np.eye(3, 4) * 1e-4,))
    assert found != token_hashes.fingerprint((tokens.reshape(4, 3),))
    assert token_hashes.fingerprint(([1, 2],)) != token_hashes.fingerprint(([1, 3],))
