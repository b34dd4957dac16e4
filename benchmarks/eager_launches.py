"""Kernels that MAR's sampling loop in eager PyTorch launches for one token, counted on a CPU.

    pip install torch && python benchmarks/eager_launches.py
    python benchmarks/eager_launches.py --file benchmarks/results/accelerator.json   # keeps it, as "eager"

Every operation that the loop of reference_torch.py dispatches and that computes something (views and empty
arrays do not) is a launch on a GPU, or more than one. The modelled time gives each the launch of an H100's
model in kernels.py and nothing for Python, which needs longer than that for each of them. The sizes are those
of the published models, the weights nothing in particular.
"""

from __future__ import annotations

import json
from pathlib import Path

import kernels
from toy import Parser, begin, sizes

from cspd_jax.diffusion.schedule import make_schedule
from cspd_jax.networks.config import MAR_PRESETS, MARConfig

NOTHING = (
    "aten.empty",
    "aten.detach",
    "aten.alias",
    "aten._unsafe_view",
    "aten.new_empty",
    "aten.lift_fresh",
)


def counter():
    """A context that counts the operations that compute something, as `launches`."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        launches = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = str(function)
            if not function.is_view and not name.startswith(NOTHING):
                self.launches += 1
            return function(*args, **(kwargs or {}))

    return Count()


def launches(config: MARConfig) -> tuple[int, int]:
    """Of the backbone for a token in the middle of an image, and of the denoising chain of that token."""
    import reference_torch
    import torch

    schedule = make_schedule(config.respacing)
    with torch.device("meta"):
        model = reference_torch.MAR(config)
    model = model.to_empty(device="cpu")
    length, known = config.seq_len, config.seq_len // 2
    mask = (torch.arange(length) >= known).float()[None]
    embedding, tokens = torch.zeros(1, config.encoder_width), torch.zeros(1, length, config.token_dim)
    with torch.inference_mode():
        with counter() as backbone:
            z = model.context(tokens, mask, embedding)
        with counter() as chain:
            model.diffloss.sample(z[0, known : known + 1], schedule, None, 1.0, 1.0)
    return backbone.launches, chain.launches


def make_parser() -> Parser:
    parser = Parser(__doc__, file=Path("eager.json"), models=["mar-base"])
    parser.add_argument("--file", type=Path, help='of which "eager" is replaced by what is found (none)')
    parser.add_argument("--models", nargs="+", default=["mar-base", "mar-large", "mar-huge"])
    return parser


def main() -> None:
    args = begin(make_parser())
    import torch

    rows = []
    for name in args.models:
        config = sizes(MAR_PRESETS, name, args.toy)
        backbone, chain = launches(config)
        row = {
            "model": name, "torch": torch.__version__, "batch": 1, "guided": False,
            "respacing": config.respacing,
            "backbone": backbone, "chain": chain, "kernels_per_token": backbone + chain,
            "modelled_seconds_per_token": (backbone + chain) * kernels.LAUNCH,
        }  # fmt: skip
        rows.append(row)
        milliseconds = 1e3 * row["modelled_seconds_per_token"]
        print(f"{name}: {backbone} + {chain} launches, {milliseconds:.1f} ms modelled")
    if args.file is None:
        return
    content = json.loads(args.file.read_text()) if args.file.exists() else {}
    unfinished = args.file.with_suffix(".eager")
    unfinished.write_text(json.dumps({**content, "eager": rows}, indent=1) + "\n")
    unfinished.replace(args.file)


if __name__ == "__main__":
    main()
