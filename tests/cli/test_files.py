"""Files that are complete or absent, and fingerprints."""

import hashlib
import json

import numpy as np
import pytest

from cspd_jax._utils import files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_or_left_alone(tmp_path):
    path = tmp_path / "x.txt"
    files.write_text(path, "one")
    files.write_text(path, "two")
    with pytest.raises(KeyboardInterrupt), files.written_beside(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "two" and names(tmp_path) == ["x.txt"]


def test_fingerprints_of_kept_samples_stay():
    """What was kept under a fingerprint is looked for under the same one."""
    params = {"b": np.arange(6, dtype=np.float32).reshape(2, 3).T, "a": np.ones(2)}
    text = json.dumps([repr("config"), 3, None])
    told = hashlib.sha256(text.encode() + params["a"].tobytes() + params["b"].tobytes()).hexdigest()
    assert files.fingerprint("config", params, 3, None) == told
    assert files.fingerprint("config", params, 4, None) != told
