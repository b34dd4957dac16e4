"""Applies the mistakes of `table.py` to a copy of the repository, one at a time, and says which of them the
tests notice.

    python tests/mutants/run.py                          # all; results.json is written as it goes
    python tests/mutants/run.py --only path,chain        # those whose names contain one of these
    python tests/mutants/run.py --workers 2 --fresh      # forget earlier results
    python tests/mutants/run.py --slow                   # survivors again, before slow tests too

What a slow test kills makes it run by default, from the next `choose_default.py` on.

A mutant is killed if one of the tests that must see it fails. One whose text is not found, or found twice, is
an error: the table has to be brought up to date. A mutant that was killed by a test that is no longer run by
default has no result: it is tried again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results.json"
_LIMIT = 300  # seconds; a mutant that makes a loop endless is killed by it
_COPIED = ("cspd_jax", "converters", "tests", "notebooks", "docs", "pyproject.toml", "README.md", "setup.py")


def apply(mutant: Mutant, root: Path) -> None:
    path = root / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        sys.exit(f"{mutant.name}: its text stands {text.count(mutant.old)} times in {mutant.file}, not once")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def tried(mutant: Mutant, slow: bool = False) -> dict:
    """Whether the tests notice it, and which one did."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, root / name, symlinks=True, ignore=ignored)
            elif source.exists():
                shutil.copy(source, root / name)
        # Imported from the copy: the installed package may be this repository itself.
        link = root / "cspd_jax" / "converters"
        if not link.is_symlink():  # some checkouts have it, and then it is copied
            os.symlink(root / "converters", link)
        apply(mutant, root)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *mutant.tests]
        command += ["-m", "not parity and not real"] * slow
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"PYTEST_XDIST_WORKER": "mutant", "JAX_PLATFORMS": "cpu"}
        environment.setdefault("CSPD_JAX_TEST_CACHE", str(ROOT / ".pytest_cache" / "programs"))
        try:
            done = subprocess.run(
                command, cwd=root, env=environment, capture_output=True, text=True, timeout=_LIMIT
            )
        except subprocess.TimeoutExpired:
            return {"killed": True, "by": "time limit", "seconds": _LIMIT}
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    if done.returncode not in (0, 1):
        sys.exit(
            f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    by = failed[0].split(" - ")[0] if failed else None
    return {"killed": done.returncode == 1, "by": by, "seconds": round(time.monotonic() - start, 1)}


def lost(results: dict[str, dict]) -> list[str]:
    """The mutants that were killed by a test which is not collected by default, or not any more."""
    killers = {name: found["by"].split(" ", 1)[1] for name, found in results.items() if _by_a_test(found)}
    files = sorted({test.split("::")[0] for test in killers.values()})
    there = [file for file in files if (ROOT / file).is_file()]
    collected = by_default(there) if there else set()
    return [name for name, test in killers.items() if test not in collected]


def _by_a_test(found: dict) -> bool:
    return found["killed"] and "::" in str(found["by"])


def by_default(files: list[str]) -> set[str]:
    """The tests in these files that are run by default."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTEST_XDIST_WORKER": "mutant", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*command, *files], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 5):  # 5: none is
        sys.exit(f"the tests cannot be collected\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {line for line in done.stdout.splitlines() if "::" in line}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", help="parts of names, separated by commas")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slow", action="store_true", help="survivors again, before slow tests too")
    parser.add_argument("--fresh", action="store_true", help="run again what has a result")
    args = parser.parse_args()
    parts = args.only.split(",") if args.only else [""]
    chosen = [m for m in MUTANTS if any(part in m.name for part in parts)]
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    names = {m.name for m in MUTANTS}
    results = {name: found for name, found in results.items() if name in names}
    earlier = {m.name: results[m.name] for m in chosen if m.name in results}
    for name in [] if args.fresh else lost(earlier):
        print(f"{name}: {results.pop(name)['by']} is not run by default", file=sys.stderr, flush=True)
    open_ones = [m for m in chosen if args.fresh or m.name not in results]
    if args.slow:
        open_ones = [m for m in chosen if not results.get(m.name, {"killed": False})["killed"]]
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        futures = {pool.submit(tried, m, args.slow): m for m in open_ones}
        for number, future in enumerate(concurrent.futures.as_completed(futures), 1):
            mutant = futures[future]
            results[mutant.name] = future.result()
            verdict = "killed" if results[mutant.name]["killed"] else "SURVIVED"
            print(f"{number}/{len(open_ones)} {mutant.name}: {verdict}", file=sys.stderr, flush=True)
            ordered = {m.name: results[m.name] for m in MUTANTS if m.name in results}
            partial = RESULTS.with_suffix(".partial")
            partial.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
            partial.replace(RESULTS)
    survived = [m.name for m in chosen if not results[m.name]["killed"]]
    for name in survived:
        why = next(m.why_it_survives for m in MUTANTS if m.name == name)
        print(f"survived: {name}{f' ({why})' if why else ''}")
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutants killed")
    return 1 if any(not m.why_it_survives for m in chosen if m.name in survived) else 0


if __name__ == "__main__":
    sys.exit(main())
