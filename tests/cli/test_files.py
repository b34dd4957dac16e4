"""Files that are complete or absent, arrays that are made once, and fingerprints."""

import hashlib
import json

import numpy as np
import pytest

from cspd_jax._utils import files
from cspd_jax.errors import UserError


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
        assert first != second
        first.write_text("1")
        second.write_text("2")
    assert (tmp_path / "x").read_text() == "1" and names(tmp_path) == ["x"]


def test_a_folder_is_removed_if_it_was_not_finished(tmp_path):
    with pytest.raises(ZeroDivisionError), files.written_beside(tmp_path / "x") as partial:
        partial.mkdir()
        (partial / "file").write_text("half")
        raise ZeroDivisionError
    assert names(tmp_path) == []


def fill(folder):
    (folder / "report.json").write_text("{}")
    (folder / "pages").mkdir()


def test_a_folder_that_is_there_stays_what_it_is(tmp_path, monkeypatch):
    """As a link to a disk, with its rights, and under the feet of who stands in it."""
    disk, link = tmp_path / "disk", tmp_path / "link"
    disk.mkdir(mode=0o2775)
    link.symlink_to(disk)
    before = disk.stat()
    files.check_new_folder(link)
    assert files.write_folder(link, "x", fill) == link
    assert (disk.stat().st_ino, disk.stat().st_mode) == (before.st_ino, before.st_mode)
    assert link.is_symlink() and names(disk) == ["pages", "report.json"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    files.check_new_folder(".")
    files.write_folder(".", "x", fill)
    assert names(files.Path.cwd()) == ["pages", "report.json"]


def test_a_folder_that_was_filled_meanwhile_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()

    def slow(folder):
        fill(folder)
        (tmp_path / "out" / "report.json").write_text("of another")

    with pytest.raises(UserError, match="not empty any more"):
        files.write_folder(tmp_path / "out", "x", slow)
    assert names(tmp_path / "out") == ["report.json"]
    assert (tmp_path / "out" / "report.json").read_text() == "of another"


def test_links_to_nothing_are_no_folders(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="out is a link to nothing; the results need a folder"):
        files.check_new_folder(tmp_path / "out")


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "none" / "x"
    with pytest.raises(UserError, match="none/x cannot be written: No such file"), files.write_errors(path):
        files.write_text(path, "")


def test_an_array_is_made_once(tmp_path):
    made = []

    def make():
        made.append(1)
        return np.arange(3)

    path = tmp_path / "a.npz"
    for _ in range(2):
        np.testing.assert_array_equal(files.kept_array(path, "origin", make), np.arange(3))
    assert len(made) == 1 and names(tmp_path) == ["a.npz"]
    with pytest.raises(UserError, match="another target or seed"):
        files.kept_array(path, "other", make)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match="damaged"):
        files.kept_array(path, "origin", make)


def test_fingerprints_of_kept_samples_stay():
    """What was kept under a fingerprint is looked for under the same one."""
    params = {"b": np.arange(6, dtype=np.float32).reshape(2, 3).T, "a": np.ones(2)}
    text = json.dumps([repr("config"), 3, None])
    told = hashlib.sha256(text.encode() + params["a"].tobytes() + params["b"].tobytes()).hexdigest()
    assert files.fingerprint("config", params, 3, None) == told
    assert files.fingerprint("config", params, 4, None) != told
    few = hashlib.sha256(b"[\"'config'\"]" + params["a"][:1].tobytes() + params["b"].ravel()[:1].tobytes())
    assert files.fingerprint("config", params, leading=1) == few.hexdigest()
