"""Decides which tests are run by default: those that catch mistakes, and those that cost nothing.

    python -m pytest -m "not parity and not real" && python tests/choose_default.py --seconds 330

Run by default, in this order, until so many seconds of one core are spent: the tests that killed a mutant
(`mutants/results.json`), tests of less than half a second, and the cheapest case of every other function, the
cheapest first. `slow_by_choice.txt` lists the others; tests that are marked slow themselves are not listed.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import budget

HERE = pathlib.Path(__file__).parent
CHOICE = HERE / "slow_by_choice.txt"
_CHEAP = 0.5  # seconds


def slow_by_choice() -> frozenset[str]:
    return frozenset(CHOICE.read_text(encoding="utf-8").splitlines())


def killers() -> set[str]:
    """The tests that are recorded to have killed a mutant."""
    results = json.loads((HERE / "mutants" / "results.json").read_text(encoding="utf-8"))
    by = [str(result["by"]).split(" ", 1)[-1] for result in results.values() if result["killed"]]
    return {budget.test_id(name) for name in by if "::" in name}


def choose(seconds: dict[str, float], needed: set[str], limit: float) -> list[str]:
    """The tests that become slow, of those whose seconds are known."""
    function = lambda test: test.split("[")[0]
    cheapest = {}
    for test in sorted(seconds, key=seconds.get):
        cheapest.setdefault(function(test), test)
    ranked = sorted(
        seconds, key=lambda t: (t not in needed, seconds[t] >= _CHEAP, t != cheapest[function(t)], seconds[t])
    )
    slow, spent = [], 0.0
    for test in ranked:
        first = test in needed or seconds[test] < _CHEAP
        if first or (test == cheapest[function(test)] and spent + seconds[test] <= limit):
            spent += seconds[test]
        else:
            slow.append(test)
    print(f"{len(seconds) - len(slow)} tests by default, {spent:.0f} s; {len(slow)} slow", file=sys.stderr)
    return sorted(slow)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=330, help="of one core, for the default tests (330)")
    parser.add_argument("--spent", type=pathlib.Path, default=budget.SPENT, help="what a run recorded")
    parser.add_argument("--scale", type=float, default=1, help="of its seconds, if the machine was not idle")
    args = parser.parse_args()
    spent = json.loads(args.spent.read_text(encoding="utf-8"))["tests"]
    seconds = {test: args.scale * value for test, value in spent.items()}
    needed = killers()
    slow = choose(seconds, needed, args.seconds)
    kept = slow_by_choice() - seconds.keys() - needed  # what that run did not run
    CHOICE.write_text("".join(f"{test}\n" for test in sorted({*slow, *kept})), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
