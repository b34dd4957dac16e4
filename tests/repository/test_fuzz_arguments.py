"""Commands with hostile values: `python tests/fuzz_arguments.py` for more of them."""

import fuzz_arguments
import pytest

from cspd_jax.cli import info


@pytest.mark.slow
def test_every_command_says_one_sentence():
    counts, failures = fuzz_arguments.run(180, 5, list(fuzz_arguments.COMMANDS))
    assert not failures
    assert sum(n for (_, ending), n in counts.items() if ending == "done") > 10


def wrong(message):
    def run(args):
        print(message)
        raise KeyError(message)

    return run


def test_a_traceback_is_noticed(monkeypatch):
    monkeypatch.setattr(info, "run", wrong("x"))
    _, failures = fuzz_arguments.run(3, 0, ["info"], progress=False)
    assert failures and {ending for ending, _, _ in failures} <= {"traceback", "code 1"}
