"""Files that are complete or absent, and fingerprints."""

import hashlib
import json

import numpy as np
import pytest

from cspd_jax._utils import files
from cspd_jax.check import UserError


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


def test_two_writers_do_not_meet(tmp_path):
    with files.written_beside(tmp_path / "x") as first, files.written_beside(tmp_path / "x") as second:
        first.write_text("1")
        second.write_text("2")
    assert (tmp_path / "x").read_text() == "1" and names(tmp_path) == ["x"]


def test_arrays_are_made_once(tmp_path):
    made, path = [], tmp_path / "a.npz"
    make = lambda: made.append(1) or {"x": np.arange(3)}
    for _ in range(2):
        np.testing.assert_array_equal(files.kept_arrays(path, "origin", make)["x"], np.arange(3))
    assert len(made) == 1
    with pytest.raises(UserError, match="another target or seed"):
        files.kept_arrays(path, "other", make)


def test_fingerprints_of_kept_samples_stay():
    """What was kept under a fingerprint is looked for under the same one."""
    params = {"b": np.arange(6, dtype=np.float32).reshape(2, 3).T, "a": np.ones(2)}
    text = json.dumps([repr("config"), 3, None])
    told = hashlib.sha256(text.encode() + params["a"].tobytes() + params["b"].tobytes()).hexdigest()
    assert files.fingerprint("config", params, 3, None) == told
    assert files.fingerprint("config", params, 4, None) != told
