"""Commands as they are typed, in this process."""

import json
import shlex

from cspd_jax.__main__ import main


def run(line):
    """The code with which a command ends."""
    return main(shlex.split(line))


def printed(capsys, line):
    """What a command prints as JSON."""
    capsys.readouterr()
    assert run(f"{line} --json") == 0
    return json.loads(capsys.readouterr().out)
