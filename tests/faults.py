"""Kills, terminates and starves tiny jobs at random moments, runs them again, and compares what comes out.

    python tests/faults.py --runs 200 --seed 0

Jobs: convert, train, distill, generate, sample; --job names one. Faults: SIGKILL; SIGTERM; a limit on the
size of files, which fails like a full disk, in the middle of a write; a second process with the same
folder, which for sample shares the work and is killed in half of the cases. After each fault the result must
be absent or complete (of sample: every file that is there); what the process said must be at most a sentence;
and the same command (with --resume where a run is continued) must end with the bits of a run that nothing
disturbed, and leave nothing unfinished behind. Prints counts, and exits with 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
_SHARDS = 22
FAULTS = ("kill", "terminate", "file limit", "rival")
TINY = (
    "model.seq_len=4", "model.buffer_size=2", "model.encoder_width=16", "model.encoder_depth=1",
    "model.encoder_heads=2", "model.decoder_width=16", "model.decoder_depth=1", "model.decoder_heads=2",
    "model.head_depth=1", "model.head_width=16", "model.respacing=ddim10", "data.size=8", "copies=2",
    "buckets=1", "log_every=1", "checkpoint_every=3", "sample_every=0", "warmup=2", "decay=4", "steps=12",
    "batch=8",
)  # fmt: skip


class Job(NamedTuple):
    """A job that is disturbed.

    start: arguments for a result at a path.
    again: arguments to go on after a fault.
    read: what counts of the result.
    shown_by: files of the result that show how far it is.
    files: how many of them there are at the end; 0 if none does.
    """

    name: str
    start: Callable[[Path], list[str]]
    again: Callable[[Path], list[str]]
    read: Callable[[Path], dict[str, np.ndarray]]
    shown_by: str = ""
    files: int = 0


class Outcome(NamedTuple):
    code: int
    told: str
    seconds: float


def jobs(work: Path) -> list[Job]:
    """The jobs, with what they need in the folder `work`."""
    import tiny
    from hf_folder import LLAMA, tensors
    from safetensors.numpy import save_file

    source = work / "llama"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(LLAMA))
    save_file(tensors(LLAMA), source / "model.safetensors")
    settings = [part for setting in TINY for part in ("--set", setting)]
    train = ["train", "--preset", "digits", *settings]
    subprocess.run(command([*train, "--out", str(work / "target")]), check=True, capture_output=True)
    target, model = str(work / "target" / "model"), tiny.save_mar(work / "model", tiny.PIXELS)
    distill = ["distill", "--preset", "digits", *settings, "--target", target, "--from", "both"]
    distill += ["--samples", "64", "--init", target]
    images = [
        "generate",
        "--target",
        model,
        "--method",
        "self",
        "--gamma",
        "2",
        "--n",
        "2",
        "--num-iter",
        "4",
    ]

    def run(arguments: list[str]) -> tuple[Callable, Callable]:
        start = lambda out: [*arguments, "--out", str(out)]
        return (
            start,
            lambda out: [arguments[0], "--resume", "--out", str(out)] if settled(out) else start(out),
        )

    def settled(out: Path) -> bool:
        return (out / "config.json").exists()

    convert = lambda out: ["convert", str(source), str(out)]
    generate = lambda out: [*images, "--out", str(out)]
    many = sample_arguments(model, 2 * _SHARDS - 1)
    sample = lambda out: [*many, "--npz", str(out / "all.npz"), "--out", str(out)]
    return [
        Job("convert", convert, convert, read_checkpoint),
        Job("train", *run(train), lambda out: read_checkpoint(out / "model")),
        Job("distill", *run(distill), lambda out: read_checkpoint(out / "model")),
        Job("generate", generate, generate, lambda out: dict(np.load(out / "samples.npz"))),
        Job("sample", sample, sample, read_samples, files=_SHARDS, shown_by="shards/*.json"),
    ]


def sample_arguments(model: str, images: int) -> list[str]:
    """Images in batches of two, each a shard."""
    many = ["sample", "--target", model, "--n", str(images), "--batch", "2", "--first", "1"]
    return [*many, "--labels", "1,0,4", "--num-iter", "4", "--tokens", "--png"]


def private_caches(work: Path) -> None:
    """What is compiled is kept, in the folder `work`."""
    os.environ.update(
        JAX_COMPILATION_CACHE_DIR=str(work / "programs"), XDG_CACHE_HOME=str(work / "cache"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0", JAX_PLATFORMS="cpu",
    )  # fmt: skip


def read_samples(folder: Path) -> dict[str, np.ndarray]:
    """The bytes of every file that does not hold times; the shards are verified too."""
    from cspd_jax.apps import bulk

    numbers = np.concatenate([shard.first + np.arange(len(shard.labels)) for shard in bulk.read(folder)])
    return {"numbers": numbers, **files_in(folder)}


def files_in(folder: Path) -> dict[str, np.ndarray]:
    """The bytes of the files that do not hold times, and the names of those that do."""
    found = {}
    for path in folder.rglob("*"):
        name, kept = path.relative_to(folder).as_posix(), not path.name.endswith((".lock", ".partial"))
        if path.is_file() and kept:
            timed = path.name == "report.json" or (path.parent.name == "shards" and path.suffix == ".json")
            found[name] = np.frombuffer(b"" if timed else path.read_bytes(), np.uint8)
    return found


def read_checkpoint(folder: Path) -> dict[str, np.ndarray]:
    import jax

    from cspd_jax import weights

    leaves = jax.tree_util.tree_leaves_with_path(weights.load(folder).params)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "cspd_jax", *arguments]


def execute(
    arguments: list[str],
    fault: str = "",
    wait: Callable[[subprocess.Popen], object] | None = None,
    limit: int = 0,
) -> Outcome:
    """Runs a command, with a fault when `wait` returns or at files of `limit` bytes."""

    def starve() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    begin = time.monotonic()
    process = subprocess.Popen(
        command(arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=starve if fault == "file limit" else None,
    )  # fmt: skip
    if wait is not None and fault in ("kill", "terminate"):
        wait(process)
        process.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGTERM)
    _, told = process.communicate(timeout=300)
    return Outcome(process.returncode, told, time.monotonic() - begin)


def moment(job: Job, out: Path, seconds: float, rng: random.Random) -> Callable[[subprocess.Popen], None]:
    """Waits for a moment of a job that takes so many seconds: a random one or, where files show how far it
    is, shortly after a random number of them is there."""
    files, delay = rng.randrange(job.files + 1), rng.uniform(0, 1.1) * seconds
    pause = rng.uniform(0, 0.05)

    def wait(process: subprocess.Popen) -> None:
        if not job.files:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(delay)
            return
        while process.poll() is None and len(list(out.glob(job.shown_by))) < files:
            time.sleep(0.002)
        time.sleep(pause)

    return wait


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


half_way: collections.Counter = collections.Counter()  # by job: faults that left some of the files


def same_file(name: str, there: dict[str, np.ndarray], whole: dict[str, np.ndarray]) -> bool:
    return name in whole and np.array_equal(there[name], whole[name])


def problems(
    job: Job, fault: str, whole: dict, seconds: float, folder: Path, rng: random.Random
) -> list[str]:
    """What went wrong with one fault: nothing, one hopes."""
    out, found = folder / "out", []
    if fault == "rival":
        rivals = [
            subprocess.Popen(
                command(job.start(out)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            for _ in "ab"
        ]
        expected = [[0, 0]] if job.name == "sample" else [[0, 0], [0, 2]]
        if job.name == "sample" and rng.random() < 0.5:
            moment(job, out, seconds, rng)(rivals[0])
            rivals[0].kill()
            expected.append([-9, 0])
        told = [r.communicate(timeout=300)[1] for r in rivals]
        codes = sorted(r.returncode for r in rivals)
        if codes not in expected or any("Traceback" in t for t in told):
            found.append(f"rivals ended with {codes}: {told[-1][-300:]}")
    else:
        limit = int(10 ** rng.uniform(2, 5))
        first = execute(job.start(out), fault, moment(job, out, seconds, rng), limit)
        expected = {"kill": (0, -9), "terminate": (0, 143, -15), "file limit": (0, 2)}[fault]
        if first.code not in expected or "Traceback" in first.told:
            found.append(f"ended with {first.code}: {first.told[-400:]}")
    if job.name == "sample" and out.exists():
        there = files_in(out)
        half_way[job.name] += (
            any(name.startswith("shards/") for name in there) and len(there) < len(whole) - 1
        )
        found += [f"{name} is not as it should be" for name in there if not same_file(name, there, whole)]
    if complete(job, out):
        try:
            if not same(job.read(out), whole):
                found.append("the result is there and other than it should be")
        except Exception as error:
            found.append(f"the result is there and cannot be read: {error}")
        if job.name in ("convert", "generate"):  # which refuse to write over a result
            return found + left_behind(folder)
    second = execute(job.again(out))
    if second.code:
        found.append(f"the second run ended with {second.code}: {second.told[-400:]}")
    elif not same(job.read(out), whole):
        found.append("the second run came to other numbers")
    return found + left_behind(folder)


def complete(job: Job, out: Path) -> bool:
    """Whether a result has its final name."""
    if job.name in ("train", "distill"):
        out = out / "model"
    if job.name == "sample":
        out = out / "all.npz"
    return out.exists()


def left_behind(folder: Path) -> list[str]:
    return [f"{path.name} was left behind" for path in folder.rglob("*.partial")]


def tried(runs: int, seed: int, name_of_job: str | None = None) -> Iterator[tuple[str, str, list[str]]]:
    """(job, fault, problems) of so many faults, the jobs and faults in turn."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        private_caches(work)
        wholes: dict[str, tuple[dict, float]] = {}
        every = [job for job in jobs(work) if name_of_job in (None, job.name)]
        if not every:
            raise SystemExit(f"there is no job {name_of_job}")
        for i in range(runs):
            job, fault = every[i % len(every)], FAULTS[i // len(every) % len(FAULTS)]
            if job.name not in wholes:
                outcomes = [execute(job.start(work / f"whole-{job.name}-{j}")) for j in range(2)]
                assert not any(o.code for o in outcomes), outcomes[0].told[-2000:]
                wholes[job.name] = job.read(work / f"whole-{job.name}-0"), outcomes[1].seconds
            folder = work / "run"
            folder.mkdir()
            yield job.name, fault, problems(job, fault, *wholes[job.name], folder, rng)
            shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", help="one of them (all)")
    args = parser.parse_args()
    counts: collections.Counter = collections.Counter()
    lost = 0
    for job, fault, found in tried(args.runs, args.seed, args.job):
        counts[job, fault] += 1
        lost += bool(found)
        for problem in found:
            print(f"\n{job}, {fault}: {problem}", flush=True)
        print(f"\r{sum(counts.values())} of {args.runs}, {lost} lost", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for (job, fault), count in sorted(counts.items()):
        print(f"{job}, {fault}: {count}")
    for job, count in half_way.items():
        print(f"{job}: {count} left it half-way")
    print(f"{sum(counts.values())} faults, {lost} with a problem")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
