"""Peak memory of `cspd-jax convert` on a training checkpoint of MAR-L's shapes.

    python benchmarks/convert_memory.py [--shapes tests/golden/mar_large_keys.json]

Writes a synthetic .pth (`model`, `model_ema`, an optimizer with two moments per weight), converts it in a
child process and prints, as one JSON object, the child's peak resident memory against the limit of
1.5 x the bytes of the EMA weights + 0.6 GB. Needs about 8 GB of temporary disk space and no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from inputs import kept
from toy import Parser, begin

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from torch_file import Storage, Tensor, contiguous, namespace, ordered_dict, write  # noqa: E402

FLOAT32 = np.dtype(np.float32)


class Repeated:
    """The bytes of `size` float32 numbers, a fixed random block over and over."""

    block = (0.02 * np.random.default_rng(0).standard_normal(2**22, np.float32)).tobytes()

    def __init__(self, size: int):
        self.size = 4 * size

    def __iter__(self):
        left = self.size
        while left > 0:
            yield self.block[:left]
            left -= len(self.block)


def random_tensor(shape) -> Tensor:
    size = math.prod(shape)
    return Tensor(Storage(FLOAT32, size, Repeated(size)), tuple(shape), contiguous(tuple(shape)))


def training_checkpoint(shapes: list) -> dict:
    """The tree that MAR's training saves; the two moments share their storage to save disk space."""
    model, ema, state = ({} for _ in range(3))
    for i, (name, shape) in enumerate(shapes):
        model[name], ema[name], moment = (random_tensor(shape) for _ in range(3))
        state[i] = {"step": float(i), "exp_avg": moment, "exp_avg_sq": moment}
    return {
        "model": ordered_dict(model),
        "model_ema": ordered_dict(ema),
        "optimizer": {"state": state, "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95)}]},
        "epoch": 399,
        "scaler": {"scale": 65536.0, "growth_factor": 2.0},
        "args": namespace(model="mar_large", patch_size=1, vae_stride=16, num_sampling_steps="100"),
    }


def narrow(shapes: list) -> list:
    """The first block of each stack."""
    return [(name, shape) for name, shape in shapes if not re.search(r"blocks\.[1-9]", name)]


def run_child(command: list[str]) -> tuple[int, float]:
    """Exit status and peak resident bytes of a command, whose standard output is discarded."""
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=quiet)
    _, status, usage = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("--shapes", type=Path, default=ROOT / "tests/golden/mar_large_keys.json")
    parser.add_argument("--tmp", help="folder for the temporary files")
    return parser


def main() -> None:
    args = begin(make_parser())
    shapes = kept(args.shapes, "keys")["keys"]
    if args.toy:
        shapes = narrow(shapes)
    ema_bytes = 4 * sum(math.prod(shape) for _, shape in shapes)
    with tempfile.TemporaryDirectory(dir=args.tmp) as folder:
        source, destination = Path(folder, "checkpoint-last.pth"), Path(folder, "converted")
        write(source, training_checkpoint(shapes))
        start = time.perf_counter()
        command = [sys.executable, "-m", "cspd_jax", "convert", str(source), str(destination)]
        status, peak = run_child([*command, "--json"])
        seconds = time.perf_counter() - start
        file_bytes = source.stat().st_size
    limit = 1.5 * ema_bytes + 0.6e9
    print(
        json.dumps(
            {
                "file_gb": round(file_bytes / 1e9, 3),
                "ema_gb": round(ema_bytes / 1e9, 3),
                "peak_rss_gb": round(peak / 1e9, 3),
                "limit_gb": round(limit / 1e9, 3),
                "within_limit": status == 0 and peak < limit,
                "seconds": round(seconds, 1),
                "exit_code": status,
            }
        )
    )
    sys.exit(status)


if __name__ == "__main__":
    main()
