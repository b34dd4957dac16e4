"""Damaged files; and that the harness notices each way to fail."""

from __future__ import annotations

import fuzz_files
import fuzz_readers
import pytest


def test_damaged_files():
    files = 4 * len(fuzz_readers.READERS)
    result = fuzz_files.run(seed=0, files=files)
    assert result.failures == [] and result.counts.total() == files
    outcomes = {outcome for _, outcome in result.counts}
    assert outcomes == {"read", "refused"}  # not all files are damaged where it matters


@pytest.mark.slow
def test_damaged_files_for_a_minute():
    result = fuzz_files.run(seed=1, minutes=1)
    assert result.failures == []


@pytest.mark.parametrize(
    "deed, outcome",
    [
        ("nothing", "read"),
        ("refuse", "refused"),
        ("raise", "traceback"),
        ("allocate", "traceback"),
        ("fill", "memory"),
        ("crash", "crash"),
        ("hang", "hang"),
        ("write", "forbidden"),
        ("execute", "forbidden"),
        ("forge", "sentence"),
    ],
)
def test_each_failure_is_noticed(worker, tmp_path, deed, outcome):
    (tmp_path / "deed").write_text(deed)
    seconds = 2.0 if outcome == "hang" else 60.0
    assert worker.ask(fuzz_readers.CONTROL, tmp_path / "deed", seconds)["outcome"] == outcome
    assert not (tmp_path / "written").exists()


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    worker = fuzz_files.Worker(tmp_path_factory.mktemp("empty"))
    yield worker
    worker.close()
