"""The table of mistakes fits the code: each stands where it says, and names tests that are there."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

import budget
import choose_default
import pytest

BY_DEFAULT = "not slow and not parity and not real"
ROOT = Path(__file__).parents[2]
MUTANTS = runpy.run_path(str(ROOT / "tests" / "mutants" / "table.py"))["MUTANTS"]
RUN = runpy.run_path(str(ROOT / "tests" / "mutants" / "run.py"))


def test_every_mistake_can_be_made():
    texts = {name: (ROOT / name).read_text() for name in {mutant.file for mutant in MUTANTS}}
    lost = [mutant.name for mutant in MUTANTS if texts[mutant.file].count(mutant.old) != 1]
    assert not lost
    assert not [mutant.name for mutant in MUTANTS if mutant.old == mutant.new]


def test_its_tests_are_there():
    named = {test.partition("::")[0] for mutant in MUTANTS for test in mutant.tests}
    assert not [name for name in named if not (ROOT / name).is_file()]
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1


def test_recorded_killers_are_run_by_default(request):
    """A mistake is seen by default only while a test that sees it is collected. Files that the run collects
    only in part are not looked at."""
    option, named = request.config.option, any("::" in name for name in request.config.args)
    if option.keyword or option.markexpr != BY_DEFAULT or named:
        pytest.skip("only some tests of a file are run")
    ids = {budget.test_id(item.nodeid) for item in request.session.items}
    files = {test.split("::")[0] for test in ids}
    everything = request.config.args == request.config.getini("testpaths")
    looked_at = {test for test in choose_default.killers() if everything or test.split("::")[0] in files}
    assert not looked_at - ids


def test_a_killer_that_is_not_run_by_default_is_no_result():
    """One that is slow by choice, one that is not there, one in a file that is not there; and one that is."""
    slow = "test_packing.py::test_packing[5]"
    assert slow in choose_default.slow_by_choice()
    tests = {
        "slow": f"FAILED tests/networks/{slow}",
        "renamed": "FAILED tests/repository/test_mutants.py::test_of_old",
        "moved": "FAILED tests/test_mutants.py::test_its_tests_are_there",
        "here": "FAILED tests/repository/test_mutants.py::test_its_tests_are_there",
        "at its limit": "time limit",
    }
    results = {name: {"killed": True, "by": by} for name, by in tests.items()}
    results["survived"] = {"killed": False, "by": None}
    assert RUN["lost"](results) == ["slow", "renamed", "moved"]
