"""Kernels that MAR's sampling loop in eager PyTorch launches for one token, counted on a CPU.

    pip install torch && python benchmarks/eager_launches.py   # writes "eager" into results/accelerator.json

Every operation that the loop of reference_torch.py dispatches and that computes something (views and empty
arrays do not) is a launch on a GPU, or more than one. The modelled time gives each the launch of an H100's
model in kernels.py and nothing for Python, which needs longer than that for each of them. The sizes are those
of the published models, the weights nothing in particular.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import kernels
import reference_torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cspd_jax.diffusion.schedule import make_schedule
from cspd_jax.networks.config import MAR_PRESETS

FILE = Path(__file__).parent / "results" / "accelerator.json"
NOTHING = (
    "aten.empty",
    "aten.detach",
    "aten.alias",
    "aten._unsafe_view",
    "aten.new_empty",
    "aten.lift_fresh",
)


class Count(TorchDispatchMode):
    """Counts the operations that compute something."""

    def __init__(self):
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if not function.is_view and not name.startswith(NOTHING):
            self.launches += 1
        return function(*args, **(kwargs or {}))


def launches(name: str, respacing: str) -> tuple[int, int]:
    """Of the backbone for a token in the middle of an image, and of the denoising chain of that token."""
    config, schedule = MAR_PRESETS[name], make_schedule(respacing)
    with torch.device("meta"):
        model = reference_torch.MAR(config)
    model = model.to_empty(device="cpu")
    length, known = config.seq_len, config.seq_len // 2
    mask = (torch.arange(length) >= known).float()[None]
    embedding, tokens = torch.zeros(1, config.encoder_width), torch.zeros(1, length, config.token_dim)
    with torch.inference_mode():
        with Count() as backbone:
            z = model.context(tokens, mask, embedding)
        with Count() as chain:
            model.diffloss.sample(z[0, known : known + 1], schedule, None, 1.0, 1.0)
    return backbone.launches, chain.launches


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--models", nargs="+", default=["mar-base", "mar-large", "mar-huge"])
    args = parser.parse_args()
    rows = []
    for name in args.models:
        backbone, chain = launches(name, "ddim100")
        row = {
            "model": name, "torch": torch.__version__, "batch": 1, "guided": False, "respacing": "ddim100",
            "backbone": backbone, "chain": chain, "kernels_per_token": backbone + chain,
            "modelled_seconds_per_token": (backbone + chain) * kernels.LAUNCH,
        }  # fmt: skip
        rows.append(row)
        milliseconds = 1e3 * row["modelled_seconds_per_token"]
        print(f"{name}: {backbone} + {chain} launches, {milliseconds:.1f} ms modelled")
    content = json.loads(args.file.read_text())
    unfinished = args.file.with_suffix(".eager")
    unfinished.write_text(json.dumps({**content, "eager": rows}, indent=1) + "\n")
    unfinished.replace(args.file)


if __name__ == "__main__":
    main()
