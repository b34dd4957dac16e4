"""Peak host memory of converting, and of loading onto a mesh, a language model of about 2 GB.

    python benchmarks/host_memory.py [--tmp FOLDER]

Writes a synthetic Llama in the Hugging Face format (float32), then measures child processes: one that only
imports the library, `cspd-jax convert`, and `load_text` in bfloat16 on eight devices that the processor
pretends to be, whose memory is the host's. Prints one JSON object. Needs about 4 GB of temporary disk space.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from convert_memory import ROOT
from toy import Parser, begin

sys.path.insert(0, str(ROOT / "tests"))
import hf_folder

SIZES = {"V": 32000, "D": 1024, "L": 24, "H": 8, "KV": 8, "M": 4096}
TOY_SIZES = {"V": 64, "D": 64, "L": 2, "H": 8, "KV": 8, "M": 128}
FILES = 2
LOAD = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import cspd_jax
from cspd_jax import parallel
if len(sys.argv) > 1:
    mesh = None if sys.argv[2] == "none" else parallel.make_mesh(sys.argv[2])
    model = cspd_jax.load_text(sys.argv[1], jax.numpy.bfloat16, mesh)
    jax.block_until_ready(model.params)
"""


def config_of(sizes: dict[str, int]) -> dict:
    return {
        **hf_folder.LLAMA, "vocab_size": sizes["V"], "hidden_size": sizes["D"],
        "num_hidden_layers": sizes["L"], "num_attention_heads": sizes["H"],
        "num_key_value_heads": sizes["KV"], "intermediate_size": sizes["M"],
    }  # fmt: skip


def write(folder: Path, sizes: dict[str, int]) -> None:
    """The folder of the synthetic model."""
    for name, size in sizes.items():
        setattr(hf_folder, name, size)
    hf_folder.write(folder, config_of(sizes), files=FILES)


def measured(arguments: list[str]) -> dict:
    """Peak memory of a Python process, and its seconds. Anonymous memory is what the system cannot take back
    by writing it to, or reading it again from, a file."""
    start, anonymous = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
        anonymous = max(anonymous, _anonymous(process.pid))
        time.sleep(0.01)
    if ended[1]:
        raise SystemExit(f"{arguments[:3]} ended with {os.waitstatus_to_exitcode(ended[1])}")
    seconds = time.perf_counter() - start
    return {"peak_bytes": 1024 * ended[2].ru_maxrss, "peak_anonymous_bytes": anonymous, "seconds": seconds}


def _anonymous(process: int) -> int:
    with contextlib.suppress(OSError):
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
        return 1024 * int(found[1]) if found else 0
    return 0


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("--tmp", help="folder for the temporary files")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    args = begin(make_parser())
    if args.write:
        return write(args.write, TOY_SIZES if args.toy else SIZES)
    with tempfile.TemporaryDirectory(dir=args.tmp) as folder:
        source, target = Path(folder, "source"), Path(folder, "converted")
        # By a child too: a process begins with the peak of the one that started it.
        subprocess.run([sys.executable, __file__, "--write", str(source), *["--toy"] * args.toy], check=True)
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        rows = {
            "import alone": measured(["-c", LOAD]),
            "convert": measured(["-m", "cspd_jax", "convert", str(source), str(target)]),
            "load, one device": measured(["-c", LOAD, str(source), "none"]),
            "load, model=8": measured(["-c", LOAD, str(source), "model=8"]),
            "load, data=2,model=4": measured(["-c", LOAD, str(source), "data=2,model=4"]),
        }
    print(json.dumps({"file_bytes": size, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
