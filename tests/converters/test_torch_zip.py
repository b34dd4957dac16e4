"""The PyTorch checkpoint reader: what it reads, and everything it refuses."""

from __future__ import annotations

import io
import os
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch_file
from torch_file import Call, Global, Raw, Tensor, namespace, ordered_dict, storage, tensor

from cspd_jax._utils import limits
from cspd_jax.converters import source
from cspd_jax.converters.torch_tensors import LazyTensor, Namespace
from cspd_jax.converters.torch_zip import open_checkpoint
from cspd_jax.errors import UserError


def read(tmp_path, tree, **options):
    torch_file.write(tmp_path / "x.pth", tree, **options)
    return open_checkpoint(tmp_path / "x.pth")


def refused(tmp_path, tree, match, **options):
    with pytest.raises(UserError, match=match):
        read(tmp_path, tree, **options)


@pytest.mark.parametrize("dtype", list(torch_file.STORAGE_NAMES), ids=str)
def test_dtypes(tmp_path, dtype):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    result = read(tmp_path, {"w": tensor(values)})["w"]
    assert isinstance(result, LazyTensor) and result.shape == (2, 3) and result.dtype == dtype
    np.testing.assert_array_equal(result.numpy(), values)
    assert not result.numpy().flags.writeable


def test_strides_offsets_and_shared_storages(tmp_path):
    shared = storage(np.arange(24, dtype=np.float32))
    base = np.arange(24, dtype=np.float32)
    tree = {
        "transposed": Tensor(shared, (4, 6), (1, 4)),
        "slice": Tensor(shared, (2, 3), (6, 2), offset=7),
        "expanded": Tensor(shared, (3, 2), (0, 1), offset=22),
        "last": Tensor(shared, (), (), offset=23),
        "empty": Tensor(shared, (0, 5), (5, 1), offset=24),
    }
    result = {name: value.numpy() for name, value in read(tmp_path, tree).items()}
    np.testing.assert_array_equal(result["transposed"], base.reshape(6, 4).T)
    np.testing.assert_array_equal(result["slice"], [[7, 9, 11], [13, 15, 17]])
    np.testing.assert_array_equal(result["expanded"], [[22, 23]] * 3)
    assert result["last"].shape == () and result["last"] == 23
    assert result["empty"].shape == (0, 5)


def test_training_checkpoint_with_everything_in_it(tmp_path):
    weight = tensor(np.ones((2, 2), np.float32))
    parameter = Call("torch._utils _rebuild_parameter", (weight, True, Call("collections OrderedDict", ())))
    tree = {
        "model": ordered_dict({"w": weight, "p": parameter}),
        "optimizer": {"state": {0: {"step": tensor(np.float32(3)), "exp_avg": weight}}, "param_groups": [{}]},
        "scaler": {"scale": 65536.0, "_growth_tracker": 12},
        "args": namespace(lr=1e-4, name="mar", resume=None, amp=True, betas=(0.9, 0.95), big=2**40),
        "size": Call("torch Size", ((2, 3),)),
    }
    result = read(tmp_path, tree)
    assert result["model"]["p"].numpy().tolist() == [[1, 1], [1, 1]]
    assert type(result["model"]) is dict and "_metadata" not in result["model"]
    expected = {"lr": 1e-4, "name": "mar", "resume": None, "amp": True, "betas": (0.9, 0.95), "big": 2**40}
    assert isinstance(result["args"], Namespace) and result["args"] == expected
    assert result["optimizer"]["state"][0]["step"].numpy() == 3 and result["size"] == (2, 3)


def test_only_chosen_tensors_are_touched(tmp_path):
    """The bytes of a tensor that is never asked for may even be missing from the disk's point of view."""
    result = read(tmp_path, {"a": tensor(np.zeros(3, np.float32)), "b": tensor(np.ones(3, np.float32))})
    before = (tmp_path / "x.pth").stat().st_atime_ns
    assert result["b"].numpy().sum() == 3 and before
    (tmp_path / "x.pth").unlink()
    with pytest.raises(UserError, match="changed while it was being read"):
        result["a"].numpy()


@pytest.mark.parametrize("protocol", range(6))
def test_pickle_protocols(tmp_path, protocol):
    tree = {"a": [1, 2.5, "x", None, True, (1, 2, 3), (), ("a",), [[]], {}], "b": 2**60, "c": "é" * 300}
    try:
        assert read(tmp_path, {}, pickle=pickle.dumps(tree, protocol)) == tree
    except UserError:
        assert protocol == 0  # text memo keys: not what torch writes


class Evil:
    def __reduce__(self):
        import os

        return os.system, ("echo evil > /dev/null",)


HOSTILE = {
    "os.system": pickle.dumps(Evil(), 2),
    "builtins.eval by stack_global": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
    "getattr": b"\x80\x02cbuiltins\ngetattr\n.",
    "dotted attribute": b"\x80\x04\x8c\x0bcollections\x8c\x16OrderedDict.__init__.x\x93.",
    "numpy": pickle.dumps(np.float64(1.0), 2),
    "inst": b"(ios\nsystem\n.",
    "extension registry": b"\x80\x02\x82\x01.",
    "obj": b"\x80\x02(cargparse\nNamespace\no.",
    "persistent text id": b"\x80\x02Pstorage\n.",
    "bytearray": b"\x80\x05\x96\x00\x00\x00\x00\x00\x00\x00\x00.",
    "next buffer": b"\x80\x05\x97.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(tmp_path, name):
    refused(tmp_path, {}, "not allowed|not among the few names", pickle=HOSTILE[name])


def test_the_refused_name_is_in_the_message(tmp_path):
    refused(tmp_path, {}, r"asks for (posix|nt)\.system,", pickle=HOSTILE["os.system"])


ORDERED = b"ccollections\nOrderedDict\n"
BROKEN = {
    "empty": b"",
    "truncated": b"\x80\x02}q\x00(X\x05\x00\x00\x00mod",
    "garbage": b"\xff\xfe\x00garbage",
    "no stop": b"\x80\x02}",
    "stack underflow": b"\x80\x02u.",
    "missing mark": b"\x80\x02}e.",
    "two objects": b"\x80\x02}}.",
    "unknown memo": b"\x80\x02h\x07.",
    "call of a number": b"\x80\x02K\x01)R.",
    "call of the result of a call": b"\x80\x02" + ORDERED + b")R)R.",
    "build on a name": b"\x80\x02" + ORDERED + b"}b.",
    "build on a list": b"\x80\x02]}b.",
    "build with a number": b"\x80\x02cargparse\nNamespace\n)\x81K\x01b.",
    "namespace with arguments": b"\x80\x02cargparse\nNamespace\nK\x01\x85R.",
    "items on a list": b"\x80\x02](K\x01K\x02u.",
    "appends on a dict": b"\x80\x02}(K\x01e.",
    "tuple as key": b"\x80\x02})K\x01s.",
    "odd dict": b"\x80\x02(K\x01d.",
    "storage type called": b"\x80\x02ctorch\nFloatStorage\n)R.",
    "persistent id of a number": b"\x80\x02K\x01Q.",
    "ordered dict of a number": b"\x80\x02" + ORDERED + b"K\x01\x85R.",
    "ordered dict of triples": b"\x80\x02" + ORDERED + b"]K\x01K\x02K\x03\x87a\x85R.",
    "parameter of a number": b"\x80\x02ctorch._utils\n_rebuild_parameter\nK\x01\x85R.",
    "size of a string": b"\x80\x02ctorch\nSize\nX\x01\x00\x00\x00x\x85R.",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_pickles_are_refused(tmp_path, name):
    refused(tmp_path, {}, "is damaged: its description of objects is broken", pickle=BROKEN[name])


def test_deep_nesting_does_not_crash(tmp_path):
    depth = 200_000
    nested = read(tmp_path, {}, pickle=b"\x80\x02)" + b"\x85" * depth + b".")
    assert isinstance(nested, tuple)
    while nested:
        (nested,) = nested


FLOATS = storage(np.zeros(10, np.float32))


@pytest.mark.parametrize(
    "bad",
    [
        Tensor(FLOATS, (11,), (1,)),
        Tensor(FLOATS, (10,), (1,), offset=1),
        Tensor(FLOATS, (2, 5), (6, 1)),
        Tensor(FLOATS, (), (), offset=10),
        Tensor(FLOATS, (2**40, 2**40), (2**40, 1)),
    ],
)
def test_tensors_beyond_their_storage(tmp_path, bad):
    refused(tmp_path, {"w": bad}, "does not fit its storage of 10 numbers")


@pytest.mark.parametrize(
    "bad",
    [
        Tensor(FLOATS, (-1,), (1,)),
        Tensor(FLOATS, (2,), (-1,), offset=5),
        Tensor(FLOATS, (2,), (1,), offset=-1),
        Tensor(FLOATS, (2, 2), (1,)),
        Tensor(FLOATS, (2.0,), (1,)),
        Tensor(FLOATS, (True,), (1,)),
        Call("torch._utils _rebuild_tensor_v2", (1, 0, (), ())),
        Call("torch._utils _rebuild_tensor_v2", ()),
    ],
)
def test_nonsense_tensors(tmp_path, bad):
    refused(tmp_path, {"w": bad}, "description of objects is broken")


def test_storage_shorter_than_it_says(tmp_path):
    short = torch_file.Storage(np.dtype(np.float32), 10, [b"\0" * 39])
    refused(tmp_path, {"w": Tensor(short, (1,), (1,))}, "10 numbers of type float32 but has only 39 bytes")


def test_unknown_storage_types_and_members(tmp_path):
    refused(tmp_path, {"w": Global("torch QInt8Storage")}, "torch.QInt8Storage, which is not among")
    refused(tmp_path, {"w": tensor(np.zeros(2))}, "member archive/data/0 is missing", without=("data/0",))
    reference = ("storage", Global("collections OrderedDict"), "0", "cpu", 1)
    pickler = torch_file._Pickler()
    refused(tmp_path, {"w": Raw(pickler.emit(reference) + b"Q")}, "a storage is not described")


def test_big_endian_and_compressed_files(tmp_path):
    tree = {"w": tensor(np.zeros(100, np.float32))}
    refused(tmp_path, tree, "big-endian", byteorder=b"big")
    refused(tmp_path, tree, "compressed", compression=zipfile.ZIP_DEFLATED)
    assert read(tmp_path, tree, byteorder=None)["w"].shape == (100,)


def test_files_that_are_no_checkpoints(tmp_path):
    path = tmp_path / "x.pth"
    with pytest.raises(UserError, match="does not exist"):
        open_checkpoint(path)
    with pytest.raises(UserError, match="is a folder"):
        open_checkpoint(tmp_path)
    contents = {
        "not the zip file": [b"", b"hello", b"\x93NUMPY"],
        "x.pth is a pointer of Git LFS; fetch": [b"version https://git-lfs.github.com/spec/v1\n"],
        "ancient tar format": [b"x" * 257 + b"ustar\x0000" + b"\0" * 300],
        "truncated or damaged": [b"PK\x03\x04" + b"\0" * 100],
    }
    for match, examples in contents.items():
        for content in examples:
            path.write_bytes(content)
            with pytest.raises(UserError, match=match):
                open_checkpoint(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(UserError, match=r"no single \*/data.pkl"):
        open_checkpoint(path)


def test_every_truncation_is_one_sentence(tmp_path):
    buffer = io.BytesIO()
    torch_file.write(buffer, {"w": tensor(np.zeros(8, np.float32)), "args": namespace(a=1)})
    whole = buffer.getvalue()
    for end in range(0, len(whole) - 1, 13):
        (tmp_path / "x.pth").write_bytes(whole[:end])
        with pytest.raises(UserError):
            open_checkpoint(tmp_path / "x.pth")


def test_flipped_bytes_never_raise_anything_else(tmp_path):
    buffer = io.BytesIO()
    torch_file.write(buffer, {"model": ordered_dict({"w": tensor(np.zeros(8, np.float32))})})
    whole, rng = bytearray(buffer.getvalue()), np.random.default_rng(0)
    for position in rng.integers(0, len(whole), 600):
        damaged = whole.copy()
        damaged[position] ^= int(rng.integers(1, 256))
        (tmp_path / "x.pth").write_bytes(damaged)
        try:
            tree = open_checkpoint(tmp_path / "x.pth")
            for value in tree.get("model", {}).values() if isinstance(tree, dict) else ():
                value.numpy()
        except UserError:
            pass


@pytest.mark.parity
def test_against_torch(tmp_path):
    torch = pytest.importorskip("torch")
    import argparse
    import collections

    base = torch.arange(60.0).reshape(3, 4, 5)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8)
    dtypes += (torch.int16, torch.int32, torch.int64, torch.bool)
    tensors = {str(d): (base % 7 - 2).clamp(min=0).to(d) for d in dtypes}
    tensors |= {"t": base.permute(2, 0, 1), "slice": base[1:, ::2, 1::3], "scalar": base[2, 3, 4]}
    tensors |= {
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(base),
        "expanded": base[:1].expand(5, 4, 5),
    }
    tree = {
        "model": module.state_dict(),
        "tensors": collections.OrderedDict(tensors),
        "optimizer": optimizer.state_dict(),
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.95)),
        "size": base.shape,
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
    }
    torch.save(tree, tmp_path / "x.pth")
    result = open_checkpoint(tmp_path / "x.pth")
    for name, expected in tensors.items():
        if expected.dtype == torch.bfloat16:
            expected = expected.to(torch.float32).numpy().astype(ml_dtypes.bfloat16)
        else:
            expected = expected.detach().numpy()
        got = result["tensors"][name].numpy()
        assert got.dtype == expected.dtype, name
        np.testing.assert_array_equal(got, expected, err_msg=name)
    for name, expected in module.state_dict().items():
        np.testing.assert_array_equal(result["model"][name].numpy(), expected.numpy())
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    np.testing.assert_array_equal(result["optimizer"]["state"][0]["exp_avg"].numpy(), moment.numpy())
    assert result["args"] == {"lr": 0.1, "betas": (0.9, 0.95)} and result["size"] == (3, 4, 5)
    torch.save(tree, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    old = open_checkpoint(tmp_path / "old.pth")
    for name in tensors:
        np.testing.assert_array_equal(old["tensors"][name].numpy(), result["tensors"][name].numpy())
    assert old["args"] == result["args"]


def test_a_tensor_that_would_fill_the_memory_is_refused(tmp_path):
    """Stride 0 lets a file of a few bytes describe any number of elements."""
    path = tmp_path / "huge.pth"
    one = torch_file.Tensor(torch_file.storage(np.zeros(1, np.float32)), (2**30, 32), (0, 0))
    torch_file.write(path, {"model": {"w": one}})
    with pytest.raises(UserError, match="more than the file has"):
        open_checkpoint(path)


def opened(tmp_path, weights):
    torch_file.write(tmp_path / "x.pth", {"model": weights})
    return source.open_source(tmp_path / "x.pth")


def test_tensors_that_take_more_than_the_file_are_refused(tmp_path):
    """By stride 0, or because many share a storage; a copy of each is the most that is read."""
    shared = storage(np.zeros(10_000, np.float32))
    once = {"z_proj.weight": Tensor(shared, (100, 100), (100, 1))}
    assert opened(tmp_path, once | {"again": Tensor(shared, (10_000,), (1,))}).kind == "mar"
    many = {f"w{i}": Tensor(shared, (10_000,), (1,)) for i in range(3)}
    with pytest.raises(UserError, match="its 4 tensors would take 160000; save each tensor once"):
        opened(tmp_path, once | many)
    with pytest.raises(UserError, match="its 2 tensors would take 40040000"):
        opened(tmp_path, once | {"wide": Tensor(shared, (1000, 10_000), (0, 1))})


def test_storages_that_are_the_same_bytes_of_the_file_count_once(tmp_path):
    weights = {f"z_proj{i}": tensor(np.full(10_000, i, np.float32)) for i in range(4)}
    torch_file.write(tmp_path / "x.pth", weights)
    assert len(source.open_source(tmp_path / "x.pth").tensors) == 4
    with zipfile.ZipFile(tmp_path / "x.pth", "a") as archive:
        first = archive.getinfo("archive/data/0")
        for info in archive.infolist():
            if info.filename.startswith("archive/data/"):
                info.header_offset = first.header_offset
        archive.start_dir = first.header_offset + 41_000
        archive._didModify = True
    with pytest.raises(UserError, match="its 4 tensors would take 160000"):
        source.open_source(tmp_path / "x.pth")


def test_pickles_that_build_too_much_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "PICKLE_WORK", 10_000)
    for instruction in (b"]", b"}", b")", b"("):
        refused(tmp_path, {}, "in more than 10000 steps; no checkpoint needs", pickle=instruction * 10_001)


def test_one_list_copied_again_and_again_is_refused(tmp_path):
    pairs = b"](" + b"K\x01K\x02\x86" * 2000 + b"eq\x00"
    again = b"ccollections\nOrderedDict\nh\x00\x85R0" * 2000
    refused(tmp_path, {}, "in more than 2097152 steps", pickle=b"\x80\x02" + pairs + again + b".")
    attributes = b"}(" + b"".join(b"K%cN" % i for i in range(200)) + b"uq\x00"
    again = b"cargparse\nNamespace\n)\x81h\x00b0" * 12_000
    refused(tmp_path, {}, "in more than 2097152 steps", pickle=b"\x80\x02" + attributes + again + b".")


def test_an_enormous_pickle_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "PICKLE_BYTES", 1000)
    refused(
        tmp_path, {}, "data.pkl has 2001 bytes; what describes tensors has at most 1000", pickle=b"]" * 2001
    )


def test_an_enormous_list_of_members_is_not_read(tmp_path, monkeypatch):
    torch_file.write(tmp_path / "x.pth", {})
    monkeypatch.setattr(limits, "DIRECTORY_BYTES", 100)
    with pytest.raises(UserError, match="a list of members of"):
        open_checkpoint(tmp_path / "x.pth")


def test_tensors_of_many_dimensions_are_refused(tmp_path):
    flat = Tensor(storage(np.zeros(1, np.float32)), (1,) * 17, (1,) * 17)
    refused(tmp_path, {"w": flat}, "a tensor is not described as torch.save describes it")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.pth")
    with pytest.raises(UserError, match="is not a regular file"):
        open_checkpoint(tmp_path / "x.pth")
