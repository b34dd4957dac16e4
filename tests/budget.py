"""What the tests spend, nearly all of it on compilation: programs by test file, CPU seconds by test.

`conftest.py` loads this as a plugin. A run of the default tests writes what it saw into
`.pytest_cache/spent.json` and fails if it compiled more programs than `golden/budget.json` allows.
`compile_budget.py` prints and changes that number; `choose_default.py` decides by the seconds which tests are
run by default.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib

import jax
import pytest

HERE = pathlib.Path(__file__).parent
CEILING = HERE / "golden" / "budget.json"
SPENT = HERE.parent / ".pytest_cache" / "spent.json"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_PHASES = (
    _COMPILED,
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
)


class Budget:
    """One for each process; with xdist the workers' tables are added up in the controller."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.file = ""
        self.programs: collections.Counter[str] = collections.Counter()
        self.compiling: collections.Counter[str] = collections.Counter()  # seconds, tracing included
        self.tests: collections.Counter[str] = (
            collections.Counter()
        )  # CPU seconds, those of children included
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, seconds: float, **_: object) -> None:
        if event in _PHASES:
            self.compiling[self.file] += seconds
            self.programs[self.file] += event == _COMPILED

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.file, before = item.path.name, sum(os.times()[:4])
        try:
            return (yield)
        finally:
            self.tests[test_id(item.nodeid)] += sum(os.times()[:4]) - before

    def pytest_testnodedown(self, node, error):
        theirs = getattr(node, "workeroutput", {}).get("budget", ({}, {}, {}))
        for mine, seen in zip((self.programs, self.compiling, self.tests), theirs):
            mine.update(seen)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if hasattr(self.config, "workeroutput"):
            counters = (self.programs, self.compiling, self.tests)
            self.config.workeroutput["budget"] = tuple(map(dict, counters))
            return
        spent = {"programs": self.programs, "compiling": self.compiling, "tests": self.tests}
        SPENT.parent.mkdir(exist_ok=True)
        SPENT.write_text(json.dumps(spent, indent=1), encoding="utf-8")
        if self.programs.total() > ceiling() and "not slow" in (self.config.option.markexpr or ""):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        total, seconds = self.programs.total(), self.compiling.total()
        terminalreporter.write_line(
            f"{total} programs compiled in {seconds:.0f} s of all processes; the default tests may compile"
            f" {ceiling()} (python tests/compile_budget.py)"
        )


def test_id(nodeid: str) -> str:
    """A test's name wherever its file lies: `test_x.py::test_y[case]`."""
    path, _, name = nodeid.partition("::")
    return f"{path.rpartition('/')[2]}::{name}"


def ceiling() -> int:
    return json.loads(CEILING.read_text(encoding="utf-8"))["programs"]
