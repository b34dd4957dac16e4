"""Gives every command hostile values, and requires of each: it does what was asked, or says one sentence.

    python tests/fuzz_arguments.py --tries 300 --seed 0
    python tests/fuzz_arguments.py --verb sample --tries 50

A try is a command that works, at a small size, with one or two of its flags given a value from `VALUES`, or a
part of it replaced by one. It fails if it ends with anything but code 0 or 2, a traceback, more than one
sentence, nothing said, results beside code 2, or after more than SECONDS.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import tiny

from cspd_jax import __main__ as cli

SECONDS = 120
VALUES = (
    "", "0", "-1", "1", "2", "65", "1.5", "1e308", "-1e-308", "nan", "inf", "1e999", "9" * 400, "１２", "1_0",
    "0x10", "none", "default", "text-default", "nosuch", "plain", "self", "speculative", "on", "a,b", "1,2,3",
    "0-9", "4x2", "/dev/null", "/dev/zero", "/proc/nowhere", ".", "..", "/", "model/config.json", "empty",
    "pipe", "loop", "x" * 5000, "\x1b[2J", "\udcff", "é", " ", "--", "*", "~", "data=2", "50:5:cosine",
    "ddim10", "flow3", "kl16", "int8",
)  # fmt: skip
ORDINARY = ("1", "2", "3", "0.5", "4,2", "model", "plain")  # what flags without choices often take
NUMBERS = (
    "0",
    "1",
    "2",
    "65",
    "200",
    "0.5",
    "1.5",
    "-1",
    "-0.0",
    "1e-308",
    "1e308",
    "1e-40",
    "3e38",
    "9" * 18,
)
# Commands that work in seconds. {out} is a new name.
_IMAGE = ["--target", "model", "--num-iter", "2", "--steps", "4", "--labels", "0", "--out", "{out}"]
COMMANDS = {
    "generate": ["--method", "plain", "--n", "1", *_IMAGE],
    "sample": ["--n", "2", "--batch", "2", *_IMAGE],
    "text": ["--prompt", "a", "--new-tokens", "2", "--method", "plain"],
    "masked": ["--prompt", "a", "--new-tokens", "2", "--no-compare"],
    "convert": ["model", "{out}"],
    "info": ["model"],
    "calibrate": ["copy", "--steps", "2"],
    "train": ["--out", "{out}", "--preset", "nosuch"],  # only what is refused: nothing is trained
    "distill": ["--out", "{out}", "--preset", "nosuch"],
    "evaluate": ["--samples", "model", "--against", "model"],
    "reproduce": ["nosuch", "--out", "{out}"],
    "demo": ["--port", "nosuch"],
}
UNTRIED = {"--help", "-h", "--version", "--distributed"}


class TooLong(BaseException):
    """More than SECONDS."""


def flags() -> dict[str, list[argparse.Action]]:
    """The arguments of each verb."""
    parser = cli.make_parser()
    (verbs,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    found = {}
    for name, verb in verbs.choices.items():
        with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            verb.parse_known_args(["--nosuch"])  # fills in the flags that are added when a verb is used
        found[name] = [a for a in verb._actions if not UNTRIED & set(a.option_strings)]
    return found


def tries(seed: int, verbs: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Commands without end."""
    known, r = flags(), random.Random(seed)
    for number in range(10**9):
        verb = verbs[number % len(verbs)]
        line = list(COMMANDS[verb])
        for _ in range(r.choice([1, 1, 2])):
            if r.random() < 0.2:
                line[r.randrange(len(line))] = r.choice(VALUES)
                continue
            action = r.choice([a for a in known[verb] if a.option_strings])
            line.append(r.choice(action.option_strings))
            if action.nargs != 0:
                listed = [str(c) for c in action.choices or ()]
                ordinary = listed or (ORDINARY if action.type is None else NUMBERS)
                line.append(r.choice(ordinary if r.random() < 0.5 else VALUES))
        yield verb, [part.replace("{out}", f"out-{number}") for part in line]


def tried(verb: str, line: list[str]) -> tuple[str, str]:
    """(how it ended, what it said)."""

    def late(*_):
        raise TooLong

    before = set(os.listdir())
    said, signal_before = io.StringIO(), signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                code = cli.main([verb, *line])
            except SystemExit as refused:
                code = refused.code
    except TooLong:
        return "too long", ""
    except BaseException:
        return "traceback", traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal_before)
    told = said.getvalue()
    new = [n for n in set(os.listdir()) - before if any(files for _, _, files in os.walk(n))]
    if "Traceback" in told:
        return "traceback", told
    if code == 2:
        errors = [part for part in told.splitlines() if "error: " in part]
        if len(errors) != 1 or not told.rstrip().endswith(errors[0]):
            return "not one sentence", told
        return ("half-written", f"{new}") if new and verb != "sample" else ("refused", errors[0])
    return ("done", "") if code == 0 else (f"code {code}", told)


def prepare() -> None:
    """What the values name, in the working directory."""
    tiny.save_mar(Path("model"), tiny.PIXELS)
    shutil.copytree("model", "copy")
    Path("empty").mkdir()
    os.mkfifo("pipe")
    os.symlink("loop", "loop")


def run(count: int, seed: int, verbs: list[str], progress: bool = True) -> tuple[collections.Counter, list]:
    """How many tries of each verb ended how, and what failed: (ending, what was typed, what was said)."""
    counts: collections.Counter = collections.Counter()
    failures, here = [], os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            prepare()
            for _, (verb, line) in zip(range(count), tries(seed, verbs)):
                ending, told = tried(verb, line)
                counts[verb, ending] += 1
                if ending not in ("done", "refused"):
                    failures.append((ending, [verb, *line], told[-2000:]))
                    if progress:
                        print(*failures[-1], sep="\n", file=sys.stderr)
        finally:
            os.chdir(here)
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tries", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verb", action="append", choices=COMMANDS)
    args = parser.parse_args()
    counts, failures = run(args.tries, args.seed, args.verb or list(COMMANDS))
    for (verb, ending), count in sorted(counts.items()):
        print(f"{verb:<12}{ending:<18}{count:>5}")
    print(f"{counts.total()} tries, {len(failures)} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
