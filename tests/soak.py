"""Hours of use: the service under mixed requests, and a job of `sample` that is struck again and again.

    python tests/soak.py service --minutes 60 --seed 0
    python tests/soak.py sample --runs 60 --seed 0

Prints a table and exits with 1 if anything was unexpected; Ctrl-C ends it early, with the table.
`service` is tests/soak_service.py. `sample` makes thousands of images in batches of two, with one process
or two at once, which are killed, terminated or interrupted at random moments; when half are there it asks for
twice as many. The folder must end with the bits of an undisturbed run, and nothing unfinished in it.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import faults
import tiny

STRIKES = {  # and how a process may end that is struck: not before it has begun, or after it has ended
    signal.SIGKILL: (-9, 0),
    signal.SIGTERM: (143, -15, 0),
    signal.SIGINT: (130, -2, 0),
}
SHARDS = 30  # of two images each, for every start of a process


class Sampling:
    """The job, and what has happened to it."""

    def __init__(self, work: Path, runs: int, seed: int, shards: int = SHARDS):
        self.work, self.runs, self.rng = work, runs, random.Random(seed)
        self.out = work / "struck"
        self.half, self.images = shards * runs - 1, 2 * shards * runs - 1  # the last shard has one image
        self.model = tiny.save_mar(work / "model", tiny.PIXELS)
        self.counts: collections.Counter = collections.Counter()
        self.problems: list[str] = []
        self.processes: list[subprocess.Popen] = []  # the newest
        self.sum = "none"

    def start(self, out: Path, images: int) -> subprocess.Popen:
        arguments = [*faults.sample_arguments(self.model, images), "--npz", str(out / "all.npz")]
        process = subprocess.Popen(
            faults.command([*arguments, "--out", str(out)]), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, process_group=0,
        )  # fmt: skip
        self.processes = [*self.processes[-1:], process]
        return process

    def made(self) -> int:
        """Shards that are there."""
        shards = self.out / "shards"
        return sum(name.endswith(".json") for name in os.listdir(shards)) if shards.exists() else 0

    def strike(self, process: subprocess.Popen, images: int) -> None:
        """After a random number of shards more, or while it begins or ends."""
        before, sent = self.made(), self.rng.choice([*STRIKES])
        goal = min(before + self.rng.randrange(2 * SHARDS), (images + 1) // 2)
        latest = time.monotonic() + (self.rng.uniform(0, 8) if self.rng.random() < 0.2 else 300)
        while process.poll() is None and self.made() < goal and time.monotonic() < latest:
            time.sleep(0.01)
        time.sleep(self.rng.uniform(0, 0.05 if self.made() < (images + 1) // 2 else 1.0))
        process.send_signal(sent)
        self.ended(process, STRIKES[sent], sent.name)
        moment = "before any shard" if self.made() == before else "in the middle of its shards"
        if process.returncode == 0:
            moment = "after its end"
        self.counts[f"{sent.name} {moment}"] += 1

    def ended(self, process: subprocess.Popen, expected: tuple[int, ...], name: str) -> None:
        told = process.communicate(timeout=600)[1]
        if name == "SIGINT" and "KeyboardInterrupt" in told and "cspd_jax" not in told:
            self.counts["SIGINT before Python had begun"] += 1  # which says so in its own way
            return
        if process.returncode not in expected or "Traceback" in told:
            self.problems.append(f"after {name} it ended with {process.returncode}: {told[-400:]}")
            print(f"\n{self.problems[-1]}", flush=True)

    def run(self) -> None:
        """The undisturbed job, the disturbed one, and the comparison."""
        begin = time.monotonic()
        try:
            print("an undisturbed run", file=sys.stderr)
            self.ended(self.start(self.work / "whole", self.images), (0,), "nothing")
            self.counts["seconds of the undisturbed run"] = round(time.monotonic() - begin)
            self.disturbed()
            self.compare(self.work / "whole")
        except KeyboardInterrupt:
            for process in self.processes:
                process.kill()
            self.problems.append("stopped before the end: nothing was compared")
        self.counts["seconds"] = round(time.monotonic() - begin)
        print(file=sys.stderr)

    def disturbed(self) -> None:
        started, images = 0, self.half
        while started < self.runs and self.made() < (self.images + 1) // 2:
            if images == self.half and (started >= self.runs / 2 or 2 * self.made() > images):
                self.ended(self.start(self.out, images), (0,), "the start before the extension")
                images = self.images
                self.counts["starts"] += 1
            processes = [self.start(self.out, images) for _ in range(self.rng.choice((1, 1, 2)))]
            started += len(processes)
            self.counts["two at once"] += len(processes) == 2
            for process in processes:
                self.strike(process, images)
            shown = f"{started} starts, {2 * self.made()} images, {len(self.problems)} problems"
            print(f"\r{shown}  ", end="", file=sys.stderr, flush=True)
        self.counts["starts"] += started + 1
        self.ended(self.start(self.out, self.images), (0,), "the last start")

    def compare(self, whole: Path) -> None:
        expected, found = faults.read_samples(whole), faults.read_samples(self.out)
        names = sorted(expected.keys() | found.keys())
        wrong = [n for n in names if n not in found or not faults.same_file(n, found, expected)]
        self.problems += [f"{name} is not that of the undisturbed run" for name in wrong[:10]]
        self.problems += faults.left_behind(self.out)
        self.counts["files compared"] = len(expected)
        self.counts["images"] = len(expected["numbers"])
        digest = hashlib.sha256()
        for name in sorted(found):
            digest.update(name.encode() + hashlib.sha256(found[name].tobytes()).digest())
        self.sum = digest.hexdigest()

    def table(self) -> str:
        lines = [f"{name:<44}{n}" for name, n in sorted(self.counts.items())]
        lines.append(f"SHA-256 of all files that hold no times: {self.sum}")
        return "\n".join([*lines, *self.problems, f"unexpected: {len(self.problems)}"])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True)
    service, sample = what.add_parser("service"), what.add_parser("sample")
    service.add_argument("--minutes", type=float, default=60)
    sample.add_argument("--runs", type=int, default=60, help="starts of a process that is struck (60)")
    for each in (service, sample):
        each.add_argument("--seed", type=int, default=0)
    return parser


def soak(args: argparse.Namespace) -> int:
    """Runs what is asked for, prints its table, and returns the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have turned off
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        faults.private_caches(work)
        if args.what == "service":
            if importlib.util.find_spec("gradio") is None:
                raise SystemExit('the service needs the extra "demo" (gradio)')
            import soak_service

            run: Sampling | soak_service.Service = soak_service.Service(work, 60 * args.minutes, args.seed)
        else:
            run = Sampling(work, args.runs, args.seed)
        run.run()
        print("\n" + run.table())
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(soak(make_parser().parse_args()))
