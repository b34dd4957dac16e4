"""The table of mistakes fits the code: each stands where it says, and names tests that are there."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTANTS = runpy.run_path(str(ROOT / "tests" / "mutants" / "table.py"))["MUTANTS"]


def test_every_mistake_can_be_made():
    texts = {name: (ROOT / name).read_text() for name in {mutant.file for mutant in MUTANTS}}
    lost = [mutant.name for mutant in MUTANTS if texts[mutant.file].count(mutant.old) != 1]
    assert not lost
    assert not [mutant.name for mutant in MUTANTS if mutant.old == mutant.new]


def test_its_tests_are_there():
    named = {test.partition("::")[0] for mutant in MUTANTS for test in mutant.tests}
    assert not [name for name in named if not (ROOT / name).is_file()]
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
