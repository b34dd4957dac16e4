"""How fast the files of a folder become training batches: kept by `Folder`, or read ahead by Grain.

    python benchmarks/loading.py [--images 600] [--device-ms 150] [--tmp FOLDER]

Makes JPEGs of 500 x 400 pixels and prints one JSON object with images per second: of decoding every file once
to 256 x 256, as `Folder` does (by threads), and one file after the other; and of training steps of 32 images
on a device that is busy for so many milliseconds a step, during which this program sleeps: from kept pixels,
from files that are read between the steps, and from files that Grain reads ahead by threads and by processes.
The seconds until the first batch are told beside.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from toy import Parser, begin, left_out

from cspd_jax.training.data import Folder, FolderConfig, StreamedFolder
from cspd_jax.training.data.folder import list_images, read_image

BATCH = 32
SIZE = 256


def write_images(root: Path, count: int) -> None:
    """Smooth pictures with some noise, so that their files are about as large as photographs."""
    random = np.random.default_rng(0)
    for i in range(count):
        folder = root / f"class{i % 4}"
        folder.mkdir(exist_ok=True)
        coarse = random.integers(0, 255, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((500, 400), Image.Resampling.BICUBIC).save(
            folder / f"{i:05d}.jpg", quality=90
        )


def one_by_one(root: Path) -> float:
    """Images per second."""
    _, files = list_images(str(root))
    start = time.perf_counter()
    for file in files:
        read_image(file.path, SIZE, 3)
    return len(files) / (time.perf_counter() - start)


def trained(batches: Iterator, device: float, batch: int, steps: int) -> dict[str, float]:
    """Images per second of steps during which the device is busy for `device` seconds."""
    start = time.perf_counter()
    next(batches)
    first = time.perf_counter()
    for _ in range(steps):
        begun = time.perf_counter()
        next(batches)  # made while the step runs
        time.sleep(max(0.0, begun + device - time.perf_counter()))
    seconds = time.perf_counter() - first
    return {"first_batch_s": round(first - start, 2), "images_per_s": round(steps * batch / seconds, 1)}


def make_parser() -> Parser:
    parser = Parser(__doc__, images=8, device_ms=1.0)
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--device-ms", type=float, default=150.0)
    parser.add_argument("--tmp")
    return parser


def main() -> None:
    args = begin(make_parser())
    device = args.device_ms / 1000
    batch, steps = (4, 2) if args.toy else (BATCH, 25)
    with tempfile.TemporaryDirectory(dir=args.tmp) as tmp:
        root = Path(tmp)
        write_images(root, args.images)
        config = FolderConfig(str(root), size=SIZE, held_out=0)
        report = {"cores": os.cpu_count(), "images": args.images, "device_ms": args.device_ms}
        report["the device alone"] = {"images_per_s": round(batch / device, 1)}
        report["decoded one by one"] = {"images_per_s": round(one_by_one(root), 1)}
        start = time.perf_counter()
        kept = Folder(config, progress=False)
        report["decoded by threads"] = {"images_per_s": round(args.images / (time.perf_counter() - start), 1)}
        streamed = StreamedFolder(config)
        for name, source in (("kept", kept), ("read between the steps", streamed)):
            batches = (source.batch(step, batch) for step in range(steps + 1))
            report[name] = trained(batches, device, batch, steps)
        if importlib.util.find_spec("grain") is None:
            left_out("files read ahead", "grain is not installed: extra `grain`")
        for workers in (0, 1, 2) if importlib.util.find_spec("grain") else ():
            ahead = StreamedFolder(config, workers=workers)
            batches = ahead.parts(0, steps + 8, np.arange(batch), batch)
            name = f"read ahead by {workers} processes" if workers else "read ahead by threads"
            report[name] = trained(batches, device, batch, steps)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
