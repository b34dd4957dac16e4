"""Every reader of files from strangers, with a small valid input; and the worker.

python tests/fuzz_readers.py FOLDER     # reads lines READER<tab>PATH, answers each with a line of JSON
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import resource
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

_MEMORY = 2 * 2**30  # address space beyond what the worker has when it is ready
_PEAK = 1 * 2**30  # resident, likewise


@dataclasses.dataclass(frozen=True)
class Reader:
    """make: writes a valid input, a file or a folder, at a path. read: reads one, whatever it is.

    pure: nothing is compiled, imported or executed meanwhile, not even by a library.
    """

    make: Callable[[Path], None]
    read: Callable[[Path], object]
    pure: bool = False


def _mar_tensors() -> dict:
    import numpy as np
    import tiny

    from cspd_jax.converters import mar

    rng = np.random.default_rng(0)
    return {e.name: rng.standard_normal(e.source_shape, np.float32) for e in mar.FORMAT.wanted(tiny.PIXELS)}


def _make_torch(path: Path) -> None:
    import torch_file

    weights = {name: torch_file.tensor(array) for name, array in _mar_tensors().items()}
    told = torch_file.namespace(encoder_num_heads=2, decoder_num_heads=2, patch_size=4, vae_stride=1, lr=1e-4)
    state = torch_file.ordered_dict(weights)
    torch_file.write(path, {"model": state, "model_ema": state, "args": told, "epoch": 3})


def _read_torch(path: Path) -> None:
    from cspd_jax.converters.torch_tensors import LazyTensor
    from cspd_jax.converters.torch_zip import open_checkpoint

    tree = open_checkpoint(path)
    for value in tree.values() if isinstance(tree, dict) else ():
        for tensor in value.values() if isinstance(value, dict) else ():
            if isinstance(tensor, LazyTensor):
                tensor.numpy()


def _convert(path: Path) -> None:
    from cspd_jax.converters.source import convert, make_config, open_source

    source = open_source(path)
    convert(source, make_config(source))


def _make_safetensors(path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(_mar_tensors(), path)


def _read_safetensors(path: Path) -> None:
    from cspd_jax.converters.source import Options, convert, make_config, open_source

    source = open_source(path)
    convert(source, make_config(source, Options(heads=(2, 2), patch_size=4, vae_stride=1)))


def _make_kl16(path: Path) -> None:
    import numpy as np
    import tiny
    from safetensors.numpy import save_file

    from cspd_jax.converters import kl16

    rng = np.random.default_rng(0)
    save_file(
        {e.name: rng.standard_normal(e.source_shape, np.float32) for e in kl16.FORMAT.wanted(tiny.KL)}, path
    )


def _read_kl16(path: Path) -> None:
    from cspd_jax.converters.source import Options, convert, make_config, open_source

    source = open_source(path)
    convert(source, make_config(source, Options(groups=4)))


def _make_svae(path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    from cspd_jax.converters import sphere_vae
    from cspd_jax.networks.sphere_config import SphereVAEConfig

    config = SphereVAEConfig((4, 64), encoder_depth=1, decoder_depth=1, latent_dim=3, registers=2)
    rng = np.random.default_rng(0)
    tensors = {
        e.name: rng.standard_normal(e.source_shape, np.float32) for e in sphere_vae.FORMAT.wanted(config)
    }
    save_file({**tensors, "vae.encoder.freqs_cis": np.zeros((3, 32, 2), np.float32)}, path)


def _make_folder(path: Path, single: bool) -> None:
    import tiny

    tiny.save_mar(path, single_file=single)
    file = path / "config.json"
    description = json.loads(file.read_text())
    del description["params_sha256"]  # it would hide what comes after it
    file.write_text(json.dumps(description))


def _read_folder(path: Path) -> None:
    import cspd_jax
    from cspd_jax.weights import models

    models.describe(str(path))
    cspd_jax.load(path)


@functools.cache
def _model():
    import tempfile

    import tiny

    import cspd_jax

    with tempfile.TemporaryDirectory() as folder:
        return cspd_jax.load(tiny.save_mar(Path(folder) / "model"))


@functools.cache
def _settings():
    from cspd_jax.image.options import Options

    return Options(num_iter=16, respacing="ddim10")


def _make_gains(path: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    shapes = {"x0": (16,), "v": (10, 16), "gain": (10,), "gain_f": (10,), "limit": (), "contexts": (1, 8, 16)}
    np.savez(path, **{name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in shapes.items()})


def _read_gains(path: Path) -> None:
    from cspd_jax.image.chain import calibration

    calibration.read(path, _model(), _settings())


def _make_hf(path: Path, config: str) -> None:
    import hf_folder

    vocabulary = {c: i for i, c in enumerate("abcdefgh▁")} | {"ab": 9}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": 10, "content": "<e>", "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "NFC"}, {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|\\s+(?!\\S)|[^\\s]+"}, "behavior": "Isolated",
             "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
        "post_processor": {"type": "TemplateProcessing",
                           "single": [{"SpecialToken": {"id": "<e>", "type_id": 0}},
                                      {"Sequence": {"id": "A", "type_id": 0}}],
                           "pair": [],
                           "special_tokens": {"<e>": {"id": "<e>", "ids": [10], "tokens": ["<e>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary,
                  "merges": [["a", "b"]]},
    }  # fmt: skip
    others = {"tokenizer.json": tokenizer, "generation_config.json": {"eos_token_id": [2, 3]}}
    hf_folder.write(path, getattr(hf_folder, config), files=2, others=others)


def _read_hf(path: Path) -> None:
    from cspd_jax.converters.source import convert, make_config, open_source
    from cspd_jax.weights.tokenizers import FileTokenizer

    if (path / "tokenizer.json").exists():
        tokenizer = FileTokenizer(path / "tokenizer.json", 40)
        tokenizer.decode(tokenizer.encode("ab cd 123 ü" * 20))
        tokenizer.decode([0, 9, 10, 39])
    source = open_source(path)
    convert(source, make_config(source))


def _make_head(path: Path, form: str) -> None:
    """A published head of drafts, of which torch's form is a pickle."""
    golden = Path(__file__).parent / "golden" / "eagle.zip"
    path.mkdir()
    with zipfile.ZipFile(golden) as archive:
        for place in archive.namelist():
            if place.startswith(form) and not place.endswith(".npz"):
                (path / Path(place).name).write_bytes(archive.read(place))


def _read_head(path: Path) -> None:
    from cspd_jax.weights.models import load_head

    load_head(path)


def _make_gguf(path: Path) -> None:
    import gguf_file

    gguf_file.write(path, gguf_file.LLAMA, gguf_file.weights(gguf_file.LLAMA), "Q8_0")


def _read_gguf(path: Path) -> None:
    from cspd_jax.converters.source import convert, make_config, open_source

    source = open_source(path)
    source.tokenizer_files()
    convert(source, make_config(source))


def _make_inception(path: Path) -> None:
    import inception_reference
    import torch_file

    weights = inception_reference.weights(16, classes=4)
    tree = {name: torch_file.tensor(array) for name, array in weights.items()}
    torch_file.write_old(path, torch_file.ordered_dict(tree))


def _make_images(path: Path) -> None:
    import numpy as np

    pixels = np.random.default_rng(0).integers(0, 256, (7, 6, 5, 3), np.uint8)
    np.savez_compressed(path, arr_0=pixels)


def _make_statistics(path: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    arrays = {"mu": rng.normal(size=6), "sigma": np.eye(6), "mu_s": rng.normal(size=4), "sigma_s": np.eye(4)}
    arrays |= {"images": np.int64(9), "network": "0" * 64 + " tf1"}
    np.savez(path, **arrays, arr_0=rng.integers(0, 256, (3, 6, 5, 3), np.uint8))


def _read_reference(path: Path) -> None:
    from cspd_jax.apps.evaluation.reference import open_reference

    found = open_reference(path)
    for _ in found.images.batches(4) if found.images else ():
        pass


def _make_flat_pictures(path: Path) -> None:
    import numpy as np
    from PIL import Image

    path.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 3), np.uint8)
    for name in ("a.png", "b.jpg", "c.png"):
        Image.fromarray(pixels).save(path / name)


def _make_run(path: Path) -> None:
    from cspd_jax.training import presets, settings_file

    path.mkdir()
    settings_file.write(presets.preset("glyphs"), path)


def _make_text_run(path: Path) -> None:
    from cspd_jax.training import presets, settings_file

    path.mkdir()
    settings_file.write(presets.preset("text-draft"), path)


def _read_run(path: Path) -> None:
    from cspd_jax.training import settings_file

    settings_file.read(path)


def _make_pictures(path: Path) -> None:
    import numpy as np
    from PIL import Image

    (path / "a").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 3), np.uint8)
    for suffix in ("png", "jpg", "gif", "bmp", "tif", "webp"):
        Image.fromarray(pixels).save(path / "a" / f"x.{suffix}", exif=Image.Exif())


def _read_pictures(path: Path) -> None:
    from cspd_jax.training.data import Folder, FolderConfig

    Folder(FolderConfig(str(path), size=8), progress=False)


def _make_samples(path: Path) -> None:
    """A finished job of three images."""
    import cspd_jax
    from cspd_jax.apps import bulk

    options = cspd_jax.Options(num_iter=1, respacing="ddim2")
    bulk.run(bulk.Job(_model(), [0, 1], 3, options=options, batch=2, tokens=True), path)


def _read_samples(path: Path) -> None:
    from cspd_jax.apps import bulk

    for _ in bulk.read(path):
        pass


def _control(path: Path) -> None:
    """Does what its file says, so that the harness can be seen to notice."""
    from cspd_jax.errors import UserError

    match path.read_text():
        case "refuse":
            raise UserError("refused")
        case "raise":
            raise KeyError("x")
        case "hang":
            time.sleep(1000)
        case "crash":
            os.abort()
        case "allocate":
            bytearray(10**13)
        case "fill":
            bytearray(b"x") * (_PEAK + 2**28)
        case "write":
            path.with_name("written").write_text("x")
        case "execute":
            os.system("true")
        case "forge":
            error = UserError("x")
            error.args = ("\x1b[2J",)
            raise error


READERS = {
    "torch": Reader(_make_torch, _read_torch, pure=True),
    "torch-convert": Reader(_make_torch, _convert),
    "safetensors": Reader(_make_safetensors, _read_safetensors),
    "folder": Reader(lambda path: _make_folder(path, False), _read_folder),
    "folder-single": Reader(lambda path: _make_folder(path, True), _read_folder),
    "gains": Reader(_make_gains, _read_gains),
    "kl16": Reader(_make_kl16, _read_kl16),
    "svae": Reader(_make_svae, _convert),
    "llama": Reader(lambda path: _make_hf(path, "LLAMA"), _read_hf),
    "gpt-neox": Reader(lambda path: _make_hf(path, "NEOX"), _read_hf),
    "llada": Reader(lambda path: _make_hf(path, "LLADA"), _read_hf),
    "head": Reader(lambda path: _make_head(path, "speculators"), _read_head),
    "head-torch": Reader(lambda path: _make_head(path, "research"), _read_head),
    "run": Reader(_make_run, _read_run),
    "text-run": Reader(_make_text_run, _read_run),
    "pictures": Reader(_make_pictures, _read_pictures),
    "samples": Reader(_make_samples, _read_samples),
    "inception": Reader(_make_inception, _convert),
    "images": Reader(_make_images, _read_reference),
    "statistics": Reader(_make_statistics, _read_reference),
    "flat-pictures": Reader(_make_flat_pictures, _read_reference),
}
if importlib.util.find_spec("gguf"):
    READERS["gguf"] = Reader(_make_gguf, _read_gguf)
CONTROL = "control"
SUFFIXES = {
    "torch": ".pth", "torch-convert": ".pth", "safetensors": ".safetensors", "kl16": ".safetensors",
    "svae": ".safetensors", "gguf": ".gguf",
    "gains": ".npz", "inception": ".pth", "images": ".npz", "statistics": ".npz",
}  # fmt: skip


class Forbidden(BaseException):
    """A reader did what no reader does."""


class Watch:
    """An audit hook: during a read no program is started and nothing is written."""

    ALWAYS = (
        "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen",
        "pty.spawn", "socket.connect", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod",
        "shutil.rmtree",
    )  # fmt: skip
    PURE = ("exec", "compile", "import", "code.__new__")

    def __init__(self):
        self.forbidden: tuple[str, ...] = ()
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple) -> None:
        if not self.forbidden:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(mode, str) and set(mode) & set("wax+")
            writes = writes or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if not writes or path in (os.devnull, os.devnull.encode()):
                return
        elif event not in self.forbidden:
            return
        self.seen.append(f"{event} {arguments!r}"[:200])
        raise Forbidden(event)


def attempt(reader: Reader, path: Path, watch: Watch) -> dict:
    """outcome: read, refused or a kind of failure; with the reason."""
    from cspd_jax.errors import UserError

    watch.seen.clear()
    outcome, reason = "read", ""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = _status("VmRSS")
    watch.forbidden = Watch.ALWAYS + (Watch.PURE if reader.pure else ())
    try:
        reader.read(path)
    except UserError as error:
        outcome, reason = "refused", str(error)
    except BaseException as error:
        outcome, reason = "traceback", f"{type(error).__name__}: {error} {_where(error)}"
    finally:
        watch.forbidden = ()
    if watch.seen:
        return {"outcome": "forbidden", "reason": watch.seen[0]}
    if _status("VmHWM") - before > _PEAK:
        return {"outcome": "memory", "reason": f"{(_status('VmHWM') - before) >> 20} MiB ({reason[:200]})"}
    if outcome == "refused" and (not reason.isprintable() or not 0 < len(reason) < 25_000):
        return {"outcome": "sentence", "reason": ascii(reason[:200])}
    return {"outcome": outcome, "reason": reason[:400]}


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return f"({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace else ""


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def serve(folder: Path) -> None:
    """Reads all valid inputs in `folder`, says so, then answers requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    watch = Watch()
    for name, reader in READERS.items():
        if (valid := folder / f"{name}{SUFFIXES.get(name, '')}").exists():
            reader.read(valid)
            reader.read(valid)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + _MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers.write("ready\n")
    for line in sys.stdin:
        name, _, path = line.rstrip("\n").partition("\t")
        reader = Reader(_control, _control) if name == CONTROL else READERS[name]
        answers.write(json.dumps(attempt(reader, Path(path), watch)) + "\n")


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
