"""Puts a trained model into the package, as one of the models that come with it. The
weights are stored in bfloat16 in a single file. For an image model, the gains of its
denoising steps are stored, too.

    python benchmarks/ship_default.py runs/glyphs/model target
    python benchmarks/ship_default.py runs/draft/model draft
    python benchmarks/ship_default.py runs/glyphs-causal/model causal
    python benchmarks/ship_default.py runs/words/model words --cfg 2 --temperature 0.9
    python benchmarks/ship_default.py runs/text-target/model text-target
"""

from __future__ import annotations

import shutil
from pathlib import Path

from toy import Parser, begin, load

import cspd_jax
from cspd_jax import hub, weights
from cspd_jax.image import Plain, calibration
from cspd_jax.image.generation import resolve
from cspd_jax.image.options import Options
from cspd_jax.models import SAMPLING
from cspd_jax.networks.registry import IMAGE_KINDS

DEFAULTS = Path(cspd_jax.__file__).parent / "defaults"


def make_parser() -> Parser:
    parser = Parser(__doc__, model=Path("model"), name="target", into=Path("defaults"))
    parser.add_argument("model", type=Path, help="checkpoint folder of a finished run")
    parser.add_argument(
        "name", choices=[*hub.DEFAULTS.values(), *hub.TEXT_DEFAULTS.values()]
    )
    parser.add_argument(
        "--cfg",
        type=float,
        help="guidance that it is sampled with, and the gains are of",
    )
    parser.add_argument(
        "--cfg-schedule",
        choices=("linear", "constant"),
        help="the same of its schedule",
    )
    parser.add_argument("--temperature", type=float, help="the same of the temperature")
    parser.add_argument(
        "--into",
        type=Path,
        default=DEFAULTS,
        help="folder of the defaults (the package's)",
    )
    return parser


def main() -> None:
    args = begin(make_parser())
    if args.toy:  # makes the folder that a training run would have written
        toy = load("default")
        weights.save(
            args.model, "mar", toy.config, toy.params, extra=toy.metadata["extra"]
        )
    loaded = weights.load(args.model, "bfloat16")
    place = args.into / args.name
    place.parent.mkdir(exist_ok=True, parents=True)
    shutil.rmtree(place, ignore_errors=True)
    metadata = {
        k: loaded.metadata[k] for k in ("source", "extra") if k in loaded.metadata
    }
    asked = {
        name: getattr(args, name)
        for name in SAMPLING
        if getattr(args, name) is not None
    }
    if asked:
        metadata["extra"] = {**metadata["extra"], "sampling": asked}
    weights.save(place, loaded.kind, loaded.config, loaded.params, **metadata)
    if loaded.kind in IMAGE_KINDS:
        model = hub.load(place)
        recipe = resolve(model, Plain(), Options(**asked))
        gains = place / calibration.FOLDER / calibration.file_name(recipe)
        calibration.write(gains, calibration.measure(model, recipe))
    size = sum(f.stat().st_size for f in place.rglob("*") if f.is_file())
    print(f"{place}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
