"""Names, shapes and sizes: nothing may be left over on either side, and everything
wrong is named."""

import math

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
import torch_writer
from recorded import GOLDEN, check_published
from safetensors.numpy import save_file

from cspd_jax.check import UserError
from cspd_jax.converters import kl16, mar
from cspd_jax.converters.source import Options, convert, make_config, open_source
from cspd_jax.converters.torch_file import open_checkpoint
from cspd_jax.networks import autoencoder
from cspd_jax.networks import mar as network
from cspd_jax.networks.autoencoder import KLConfig
from cspd_jax.networks.mar import MAR_PRESETS

HEADS = Options(heads=(4, 4))


PUBLISHED = {
    f"mar_{s}": (mar, MAR_PRESETS[f"mar-{s}"], network)
    for s in ("base", "large", "huge")
}
PUBLISHED |= {"kl16_full": (kl16, KLConfig(), autoencoder)}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_map_completely(name):
    converter, published, module = PUBLISHED[name]
    description = check_published(GOLDEN / f"{name}_keys.json", converter, published)
    leaves = jax.tree.leaves(module.abstract_params(published))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == description["params"]


@pytest.mark.parametrize(
    "name, patch, stride, steps",
    [("mar_tiny", 1, 16, "8"), ("mar_tiny_patch2", 2, 8, "10")],
)
def test_config_of_a_file_with_args(name, patch, stride, steps):
    """But for what the options say."""
    source = open_source(GOLDEN / f"{name}.pth")
    flags = Options(heads=(2, 8), patch_size=4, respacing="ddim50", vae_stride=1)
    for options, expected in (
        (HEADS, (patch, stride, steps, 4, 4)),
        (flags, (4, 1, "ddim50", 2, 8)),
    ):
        c = make_config(source, options)
        sizes = c.patch_size, c.vae_stride, c.respacing
        assert (*sizes, c.encoder_heads, c.decoder_heads) == expected
    sizes = c.buffer_size, c.num_classes, c.head_depth, c.head_width
    assert sizes == (4, 10, 2, 48)


def test_the_averages_of_the_weights_are_read():
    """Unless others are asked for; in the recorded file those are 0.999 times as
    large."""
    params, others = (
        convert(source, make_config(source, HEADS))
        for source in (
            open_source(GOLDEN / "mar_tiny.pth", which) for which in (None, "model")
        )
    )
    for leaf in jax.tree.leaves(params):
        assert leaf.dtype == np.float32 and leaf.flags.c_contiguous
    own, other = (tree["head"]["cond_embed"]["kernel"] for tree in (params, others))
    chex.assert_trees_all_close(other, 0.999 * own, rtol=1e-6)


def state_dict(name):
    state = open_checkpoint(GOLDEN / name)
    state = state.get("model_ema", state.get("model"))
    return {key: np.array(value.numpy()) for key, value in state.items()}


@pytest.mark.parametrize(
    "name, options, dtype",
    [
        ("mar_tiny.pth", HEADS, np.float16),
        pytest.param(
            "kl16_g16.ckpt", Options(), ml_dtypes.bfloat16, marks=pytest.mark.slow
        ),
    ],
)
def test_safetensors(tmp_path, name, options, dtype):
    file = tmp_path / "x.safetensors"
    save_file({k: v.astype(dtype) for k, v in state_dict(name).items()}, file)
    source = open_source(file)
    original = open_source(GOLDEN / name)
    assert source.kind == original.kind
    config = make_config(source, options)
    known = Options(options.heads, respacing="100") if options.heads else options
    assert config == make_config(original, known)
    rounded = lambda leaf: leaf.astype(dtype).astype(np.float32)
    theirs = jax.tree.map(rounded, convert(original, config))
    chex.assert_trees_all_equal(convert(source, config), theirs)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    whole = state_dict("mar_tiny.pth")
    bias = "encoder_blocks.1.attn.qkv.bias"
    many = {f"x{i}": np.zeros(1) for i in range(9)}
    for changes, match in (
        ({bias: None}, r"1 missing \(encoder_blocks\.1\.attn\.qkv\.bias\)"),
        (
            {bias: np.zeros(95)},
            r"1 misshapen \(encoder_blocks\.1\.attn\.qkv\.bias is \[95\]",
        ),
        (many, r"9 unknown \(x0, x1, x2, x3, x4 and 4 more\)"),
        ({"z_proj.weight": None}, "missing z_proj.weight"),
        (
            {name: None for name in whole if name.startswith("decoder_blocks")},
            r"missing decoder_blocks\.0\.",
        ),
    ):
        state = {
            n: value for n, value in (whole | changes).items() if value is not None
        }
        torch_writer.write(tmp_path / "x.pth", {"model_ema": state})
        with pytest.raises(UserError, match=match):
            source = open_source(tmp_path / "x.pth")
            convert(source, make_config(source, HEADS))
