"""Files that are complete or absent, and fingerprints."""

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
