"""Damages small valid files at random and requires of every reader: success, or one sentence (UserError).

    python tests/fuzz_files.py --minutes 5 --seed 0
    python tests/fuzz_files.py --reader torch --reader gains --minutes 1 --keep failures

A failure is another exception, a process that dies, more than SECONDS (asked again, more than PATIENCE: a
busy machine is no hang), a gigabyte of memory, a sentence with unprintable characters, a program
that is started or a file that is written. Files that fail are kept.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fuzz_mutations import mutate
from fuzz_readers import READERS, SUFFIXES

SECONDS = 5.0
PATIENCE = 30.0
_START = 120.0
GOOD = ("read", "refused")


class Result(NamedTuple):
    """counts: (reader, outcome) -> files. failures: (reader, outcome, reason, what is kept of it)."""

    counts: collections.Counter
    failures: list[tuple[str, str, str, Path]]


class Worker:
    """A process that reads many files, started again after it died."""

    def __init__(self, valid: Path):
        self._valid, self._process = valid, None

    def ask(self, reader: str, path: Path, seconds: float = SECONDS) -> dict:
        process = self._running()
        try:
            process.stdin.write(f"{reader}\t{path}\n".encode())
            process.stdin.flush()
        except BrokenPipeError:
            return self._ended("crash", f"exit status {process.wait()}")
        if (line := self._line(seconds)) is None:
            return self._ended("hang", f"more than {seconds:g} s")
        return json.loads(line) if line else self._ended("crash", f"exit status {process.wait()}")

    def close(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _running(self) -> subprocess.Popen:
        if self._process is None:
            command = [sys.executable, str(Path(__file__).with_name("fuzz_readers.py")), str(self._valid)]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "RUST_BACKTRACE": "0"}
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
                env=environment,
            )  # fmt: skip
            if self._line(_START) != b"ready\n":
                raise RuntimeError("the worker cannot read the valid files")
        return self._process

    def _line(self, seconds: float) -> bytes | None:
        """The next line; None if there is none in time, empty if the process ended."""
        until, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], max(0, until - time.monotonic()))[0]:
                return None
            piece = os.read(self._process.stdout.fileno(), 65_536)
            if not piece:
                return b""
            line += piece
        return line

    def _ended(self, outcome: str, reason: str) -> dict:
        self.close()
        return {"outcome": outcome, "reason": reason}


def make_valid(folder: Path, readers: Iterable[str]) -> dict[str, Path]:
    """A valid input of each reader."""
    made = {name: folder / f"{name}{SUFFIXES.get(name, '')}" for name in readers}
    for name, path in made.items():
        READERS[name].make(path)
    return made


def damaged(valid: Path, place: Path, r: random.Random) -> Path:
    """A copy of the input at `place`, with one of its files (sometimes two) damaged."""
    if valid.is_dir():
        shutil.copytree(valid, place)
        files = sorted(p for p in place.rglob("*") if p.is_file())
        described = [p for p in files if p.suffix == ".json"]
    else:
        place = place.with_suffix(valid.suffix)
        shutil.copyfile(valid, place)
        files, described = [place], []
    for _ in range(r.choice([1, 1, 1, 2])):
        file = r.choice(described if described and r.random() < 0.6 else files)
        if r.random() < 0.05:
            no_file(file, r)
            break
        file.write_bytes(mutate(file, r))
    return place


def no_file(path: Path, r: random.Random) -> None:
    """Puts something that is no regular file in the place of one."""
    path.unlink()
    match r.choice(["pipe", "folder", "loop", "nowhere", "endless"]):
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
        case "nowhere":
            path.symlink_to("nothing-there")
        case "endless":
            path.symlink_to("/dev/zero")


def run(
    readers: Iterable[str] = tuple(READERS),
    *,
    seed: int = 0,
    files: int | None = None,
    minutes: float | None = None,
    keep: Path | None = None,
) -> Result:
    """Tries `files` files, or for so many minutes, the readers taking turns. File i depends on seed and i."""
    counts: collections.Counter = collections.Counter()
    failures = []
    until = None if minutes is None else time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        valid = make_valid(Path(folder), readers)
        worker = Worker(Path(folder))
        names, index = list(valid), 0
        try:
            while (files is None or index < files) and (until is None or time.monotonic() < until):
                name = names[index % len(names)]
                r = random.Random(f"{seed}-{index}")
                path = damaged(valid[name], Path(folder) / f"case-{index}", r)
                answer = worker.ask(name, path)
                if answer["outcome"] == "hang":
                    answer = worker.ask(name, path, PATIENCE)
                counts[name, answer["outcome"]] += 1
                if answer["outcome"] not in GOOD:
                    failures.append((name, answer["outcome"], answer["reason"], _keep(path, keep, seed)))
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                index += 1
        finally:
            worker.close()
    return Result(counts, failures)


def _keep(path: Path, keep: Path | None, seed: int) -> Path:
    if keep is None:
        return Path(path.name)
    keep.mkdir(parents=True, exist_ok=True)
    kept = keep / f"seed-{seed}-{path.name}"
    subprocess.run(["cp", "-a", path, kept], check=True)  # pipes and links as they are
    return kept


def table(result: Result) -> str:
    """A line for each reader, with a column for each outcome."""
    outcomes = [*GOOD, *sorted({outcome for _, outcome in result.counts} - set(GOOD))]
    lines = ["reader".ljust(16) + "".join(o.rjust(11) for o in outcomes)]
    for name in dict.fromkeys(name for name, _ in result.counts):
        lines.append(name.ljust(16) + "".join(str(result.counts[name, o]).rjust(11) for o in outcomes))
    return "\n".join([*lines, f"{result.counts.total()} files, {len(result.failures)} failures"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", action="append", choices=list(READERS), help="only this one; repeatable")
    parser.add_argument(
        "--keep", type=Path, default=Path("fuzz-failures"), help="the folder for files that fail"
    )
    args = parser.parse_args()
    result = run(args.reader or list(READERS), seed=args.seed, minutes=args.minutes, keep=args.keep)
    for name, outcome, reason, path in result.failures:
        print(f"{name} {outcome} {path}: {reason!a}")
    print(table(result))
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
