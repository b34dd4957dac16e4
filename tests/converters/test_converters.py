"""Names, shapes and sizes: nothing may be left over on either side, and everything wrong is named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import torch_writer
from safetensors.numpy import save_file
from torch_writer import ordered_dict, tensor

from cspd_jax.check import UserError
from cspd_jax.converters import kl16, mar
from cspd_jax.converters._tables import Shapes
from cspd_jax.converters.source import Options, convert, make_config, open_source
from cspd_jax.converters.torch_file import open_checkpoint
from cspd_jax.networks import autoencoder
from cspd_jax.networks import mar as network
from cspd_jax.networks.config import MAR_PRESETS, KLConfig

GOLDEN = Path(__file__).parents[1] / "golden"
HEADS = Options(heads=(4, 4))


def recorded(name):
    description = json.loads((GOLDEN / f"{name}_keys.json").read_text())
    return description, Shapes({key: tuple(shape) for key, shape in description["keys"]})


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", ["base", *(pytest.param(s, marks=pytest.mark.slow) for s in ("large", "huge"))]
)
def test_published_mar_sizes_map_completely(size):
    description, shapes = recorded(f"mar_{size}")
    config = mar.make_config(shapes)
    assert config == MAR_PRESETS[f"mar-{size}"]
    plan = mar.FORMAT.plan(config, shapes)
    assert {entry.name for entry in plan} == set(shapes) and len(plan) == len(shapes)
    leaves = jax.tree.leaves(network.abstract_params(config))
    assert len(leaves) == len(plan)
    assert sum(math.prod(leaf.shape) for leaf in leaves) == description["params"]


@pytest.mark.slow
def test_published_kl16_maps_completely():
    description, shapes = recorded("kl16_full")
    config = kl16.make_config(shapes)
    assert config == KLConfig()
    plan = kl16.FORMAT.plan(config, shapes)
    assert {entry.name for entry in plan} == set(shapes) and len(plan) == len(shapes)
    leaves = jax.tree.leaves(autoencoder.abstract_params(config))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == description["params"]


@pytest.mark.parametrize(
    "name, patch, stride, steps", [("mar_tiny", 1, 16, "8"), ("mar_tiny_patch2", 2, 8, "10")]
)
def test_config_of_a_file_with_args(name, patch, stride, steps):
    source = open_source(GOLDEN / f"{name}.pth")
    config = make_config(source, HEADS)
    assert (config.patch_size, config.vae_stride, config.respacing) == (patch, stride, steps)
    assert config.image_size == 64 and (config.encoder_heads, config.decoder_heads) == (4, 4)
    assert (config.buffer_size, config.num_classes, config.head_depth, config.head_width) == (4, 10, 2, 48)
    flags = Options(heads=(2, 8), patch_size=4, steps="ddim50", vae_stride=1)
    config = make_config(source, flags)
    assert (config.patch_size, config.vae_stride, config.respacing) == (4, 1, "ddim50")
    assert (config.encoder_heads, config.decoder_heads) == (2, 8)


def test_values_land_where_they_belong():
    source = open_source(GOLDEN / "mar_tiny.pth")
    state = open_checkpoint(GOLDEN / "mar_tiny.pth")["model_ema"]
    params = convert(source, make_config(source, HEADS))
    get = lambda name: state[name].numpy()
    block = params["backbone"]["encoder_blocks_1"]
    np.testing.assert_array_equal(block["attn"]["qkv"]["kernel"], get("encoder_blocks.1.attn.qkv.weight").T)
    np.testing.assert_array_equal(block["norm2"]["scale"], get("encoder_blocks.1.norm2.weight"))
    np.testing.assert_array_equal(params["backbone"]["class_emb"]["embedding"], get("class_emb.weight"))
    np.testing.assert_array_equal(params["backbone"]["mask_token"], get("mask_token"))
    head = params["head"]["res_blocks_0"]["adaLN_modulation_1"]["kernel"]
    np.testing.assert_array_equal(head, get("diffloss.net.res_blocks.0.adaLN_modulation.1.weight").T)
    assert all(leaf.dtype == np.float32 and leaf.flags.c_contiguous for leaf in jax.tree.leaves(params))
    other = open_source(GOLDEN / "mar_tiny.pth", "model")
    ratio = convert(other, make_config(other, HEADS))["head"]["cond_embed"]["kernel"]
    np.testing.assert_allclose(ratio, 0.999 * params["head"]["cond_embed"]["kernel"], rtol=1e-6)


@pytest.mark.slow
def test_convolution_kernels():
    source = open_source(GOLDEN / "kl16_g16.ckpt")
    params = convert(source, make_config(source))
    weight = source.tensors["encoder.down.2.block.0.conv1.weight"].numpy()
    kernel = params["encoder"]["down_2_block_0"]["conv1"]["kernel"]
    assert weight.shape == (32, 16, 3, 3) and kernel.shape == (3, 3, 16, 32)
    assert kernel[0, 2, 5, 7] == weight[7, 5, 0, 2]


def state_dict(name="mar_tiny.pth"):
    state = open_checkpoint(GOLDEN / name)
    state = state.get("model_ema", state.get("model"))
    return {key: np.array(value.numpy()) for key, value in state.items()}


@pytest.fixture(scope="module")
def tiny():
    return state_dict()


@pytest.mark.quick(
    "mar_tiny.pth-options0-float32", "mar_tiny.pth-options1-float16", "mar_tiny.pth-options2-bfloat16"
)
@pytest.mark.parametrize(
    "name, options, dtype",
    [
        ("mar_tiny.pth", HEADS, np.float32),
        ("mar_tiny.pth", HEADS, np.float16),
        ("mar_tiny.pth", HEADS, ml_dtypes.bfloat16),
        ("kl16_g16.ckpt", Options(), ml_dtypes.bfloat16),
        pytest.param("kl16_g16.ckpt", Options(), np.float32, marks=pytest.mark.slow),
        pytest.param("kl16_g16.ckpt", Options(), np.float16, marks=pytest.mark.slow),
    ],
)
def test_safetensors(tmp_path, name, options, dtype):
    save_file({k: v.astype(dtype) for k, v in state_dict(name).items()}, tmp_path / "x.safetensors")
    source = open_source(tmp_path / "x.safetensors")
    original = open_source(GOLDEN / name)
    assert source.kind == original.kind
    config = make_config(source, options)
    assert config == make_config(original, Options(options.heads, steps="100") if options.heads else options)
    ours, theirs = convert(source, config), convert(original, config)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(dtype).astype(np.float32)), ours, theirs
    )


def refused(tmp_path, tree, match, options=HEADS, weights=None):
    torch_writer.write(tmp_path / "x.pth", tree)
    with pytest.raises(UserError, match=match):
        source = open_source(tmp_path / "x.pth", weights)
        convert(source, make_config(source, options))


def changed(tiny, **changes):
    state = dict(tiny)
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del state[name]
        else:
            state[name] = value
    return {"model_ema": ordered_dict({k: tensor(v) for k, v in state.items()})}


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path, tiny):
    name = "encoder_blocks__1__attn__qkv__bias"
    refused(tmp_path, changed(tiny, **{name: None}), r"1 missing \(encoder_blocks\.1\.attn\.qkv\.bias\)")
    refused(tmp_path, changed(tiny, surprise=np.zeros(3)), r"1 unknown \(surprise\)")
    wrong = changed(tiny, **{name: np.zeros(95)})
    refused(
        tmp_path, wrong, r"1 misshapen \(encoder_blocks\.1\.attn\.qkv\.bias is \[95\] instead of \[96\]\)"
    )
    many = {f"x{i}": np.zeros(1) for i in range(9)}
    refused(tmp_path, changed(tiny, **many), r"9 unknown \(x0, x1, x2, x3, x4 and 4 more\)")
    refused(tmp_path, changed(tiny, z_proj__weight=None), "missing z_proj.weight")
    refused(tmp_path, changed(tiny, z_proj__weight=np.zeros(3)), r"misshapen z_proj.weight is \[3\]")
    refused(tmp_path, changed(tiny, encoder_pos_embed_learned=None), "missing encoder_pos_embed_learned")
    for part in ("encoder_blocks", "decoder_blocks", "diffloss.net.res_blocks"):
        none = {k: tensor(v) for k, v in tiny.items() if not k.startswith(part)}
        refused(tmp_path, none, rf"missing {part}\.0\.")
    fixed = changed(tiny, encoder_pos_embed=np.zeros((1, 20, 32)))
    refused(tmp_path, fixed, r"1 unknown \(encoder_pos_embed\)")
    gap = {k.replace("encoder_blocks.1.", "encoder_blocks.7."): tensor(v) for k, v in tiny.items()}
    refused(tmp_path, gap, r"missing \(encoder_blocks\.1\..*unknown \(encoder_blocks\.7\.")
