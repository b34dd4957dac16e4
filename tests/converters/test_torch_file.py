"""The PyTorch checkpoint reader: what it reads, and everything it refuses."""

from __future__ import annotations

import contextlib
import os
import pickle

import chex
import numpy as np
import pytest
import torch_writer
from torch_writer import Call, Tensor, namespace, ordered_dict, storage, tensor

from cspd_jax.check import UserError
from cspd_jax.converters import torch_file
from cspd_jax.converters.torch_file import LazyTensor, Namespace, open_checkpoint


def read(tmp_path, tree, **options):
    torch_writer.write(tmp_path / "x.pth", tree, **options)
    return open_checkpoint(tmp_path / "x.pth")


def refused(tmp_path, tree, match, **options):
    with pytest.raises(UserError, match=match):
        read(tmp_path, tree, **options)


@pytest.mark.parametrize("dtype", list(torch_writer.STORAGE_NAMES), ids=str)
def test_dtypes(tmp_path, dtype):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    result = read(tmp_path, {"w": tensor(values)})["w"]
    assert isinstance(result, LazyTensor) and result.shape == (2, 3) and result.dtype == dtype
    chex.assert_trees_all_equal(result.numpy(), values)
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
    chex.assert_trees_all_equal(result["transposed"], base.reshape(6, 4).T)
    assert result["slice"].tolist() == [[7, 9, 11], [13, 15, 17]]
    assert result["expanded"].tolist() == [[22, 23]] * 3
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
    assert isinstance(result["model"], dict) and "_metadata" not in result["model"]
    expected = {"lr": 1e-4, "name": "mar", "resume": None, "amp": True, "betas": (0.9, 0.95), "big": 2**40}
    assert isinstance(result["args"], Namespace) and result["args"] == expected
    assert result["optimizer"]["state"][0]["step"].numpy() == 3 and result["size"] == (2, 3)


class Evil:
    def __reduce__(self):

        return os.system, ("echo evil > /dev/null",)


HOSTILE = {
    "os.system": pickle.dumps(Evil(), 2),
    "builtins.eval by stack_global": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
    "getattr": b"\x80\x02cbuiltins\ngetattr\n.",
    "dotted attribute": b"\x80\x04\x8c\x0bcollections\x8c\x16OrderedDict.__init__.x\x93.",
    "numpy": pickle.dumps(np.float64(1.0), 2),
    "inst": b"(ios\nsystem\n.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(tmp_path, name):
    refused(tmp_path, {}, "not among the few names", pickle=HOSTILE[name])


def test_a_pickle_changes_nothing_of_the_reader(tmp_path):
    """It sets attributes of the class and of the function that it is given: a state of slots does."""
    for name in (b"argparse\nNamespace", b"torch._utils\n_rebuild_parameter"):
        slots = b"\x80\x02c" + name + b"\nN}X\x01\x00\x00\x00xK\x01s\x86b0}."
        with contextlib.suppress(UserError):
            read(tmp_path, {}, pickle=slots)
    assert not hasattr(Namespace, "x") and not hasattr(torch_file._parameter, "x")


@pytest.mark.parametrize(
    "shape, strides, offset",
    [((11,), (1,), 0), ((10,), (1,), 1), ((2, 5), (6, 1), 0), ((), (), 10), ((2**40, 2**40), (2**40, 1), 0)],
)
def test_tensors_beyond_their_storage(tmp_path, shape, strides, offset):
    bad = Tensor(storage(np.zeros(10, np.float32)), shape, strides, offset)
    refused(tmp_path, {"w": bad}, "does not fit its storage")


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
    tensors = {str(d): (base % 7).to(d) for d in (torch.float16, torch.float64, torch.int8, torch.bool)}
    tensors |= {"transposed": base.permute(2, 0, 1), "slice": base[1:, ::2, 1::3], "scalar": base[2, 3, 4]}
    tensors |= {"parameter": torch.nn.Parameter(base), "expanded": base[:1].expand(5, 4, 5)}
    tree = {
        "model": module.state_dict(),
        "tensors": collections.OrderedDict(tensors),
        "optimizer": optimizer.state_dict(),
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.95)),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
    }
    for name, zipped in (("new.pth", True), ("old.pth", False)):
        torch.save(tree, tmp_path / name, _use_new_zipfile_serialization=zipped)
        found = open_checkpoint(tmp_path / name)
        assert found["args"] == {"lr": 0.1, "betas": (0.9, 0.95)}
        moment = optimizer.state_dict()["state"][0]["exp_avg"]
        chex.assert_trees_all_equal(found["optimizer"]["state"][0]["exp_avg"].numpy(), moment.numpy())
        for part in ("model", "tensors"):
            for key, expected in tree[part].items():
                ours, theirs = found[part][key].numpy(), expected.detach().numpy()
                assert ours.dtype == theirs.dtype, key
                chex.assert_trees_all_equal(ours, theirs)


def test_the_format_before_pytorch_1_6(tmp_path):
    values = np.arange(24, dtype=np.float32)
    shared = storage(values)
    tree = {
        "model": ordered_dict({"w": Tensor(shared, (4, 6), (6, 1)), "t": Tensor(shared, (2, 3), (1, 2), 5)}),
        "count": tensor(np.array([7, 8])),
        "args": namespace(lr=0.5),
    }
    torch_writer.write_old(tmp_path / "x.pth", tree)
    found = open_checkpoint(tmp_path / "x.pth")
    chex.assert_trees_all_equal(found["model"]["w"].numpy(), values.reshape(4, 6))
    assert found["model"]["t"].numpy().tolist() == [[5, 7, 9], [6, 8, 10]]
    assert found["count"].numpy().tolist() == [7, 8]
    assert found["args"] == {"lr": 0.5}
