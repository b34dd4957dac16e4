"""Hugging Face folders of language models: names, configurations, values."""

import dataclasses

import chex
import jax
import pytest
from hf_folder import (
    CONFIGS,
    DREAM,
    FAST_DLLM,
    LLADA,
    LLAMA,
    NEOX,
    QWEN2,
    SDAR,
    V,
    tensors,
    write,
)

from cspd_jax.check import UserError
from cspd_jax.converters import lm as converter
from cspd_jax.converters.hf import Values
from cspd_jax.converters.source import convert, make_config, open_source
from cspd_jax.networks import lm
from cspd_jax.networks.lm import LMConfig


def newer(config):
    """The same configuration with its rotary settings where newer files keep them."""
    old = {"rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base"}
    rope = {"rope_type": "default", **(config.get("rope_scaling") or {})}
    rope["rope_theta"] = config.get("rope_theta", config.get("rotary_emb_base"))
    if "rotary_pct" in config:
        rope["partial_rotary_factor"] = config["rotary_pct"]
    return {key: value for key, value in config.items() if key not in old} | {
        "rope_parameters": rope
    }


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_older_and_newer_configurations(tmp_path, config):
    """Newer ones, of one file of weights, are compared by their logits in
    test_lm_parity.py."""
    old, new = (
        open_source(write(tmp_path / str(files), of, files=files))
        for of, files in ((config, 3), (newer(config), 1))
    )
    found = make_config(old)
    assert found == make_config(new) and found.bos_ids == (config["bos_token_id"],)
    chex.assert_trees_all_equal(convert(old, found), convert(new, found))


def test_masked_diffusion_models(tmp_path):
    """What LLaDA's configuration may leave out, what Dream and Fast-dLLM v2 are beside
    Qwen2, and what SDAR says."""
    whole = make_config(open_source(write(tmp_path / "llada", LLADA)))
    left_out = dict.fromkeys(("n_kv_heads", "mlp_hidden_size", "embedding_size"))
    left_out = LLADA | left_out | {"mlp_ratio": 1.5}
    short = write(tmp_path / "short", left_out, tensors(LLADA))
    assert make_config(open_source(short)) == whole
    assert (whole.causal, whole.mask_ids, whole.eos_ids) == (False, (9,), (3,))
    dream, qwen2, sdar, fast = (
        make_config(open_source(write(tmp_path / c["model_type"], c)))
        for c in (DREAM, QWEN2, SDAR, FAST_DLLM | {"mask_token_id": 8})
    )
    assert not sdar.causal and not sdar.shifted
    assert (sdar.block, sdar.mask_ids) == (4, (8,))
    of_blocks = {"family": "Fast_dLLM_Qwen", "tie_embeddings": True, "block": 8}
    assert fast == dataclasses.replace(dream, **of_blocks)
    with pytest.raises(UserError, match=r"mask_token_id is .* be in the vocabulary"):
        make_config(open_source(write(tmp_path / "fast", FAST_DLLM)))
    masked = {
        "family": "Dream",
        "tie_embeddings": False,
        "causal": False,
        "shifted": True,
        "mask_ids": (8,),
    }
    assert dream == dataclasses.replace(qwen2, **masked)


def sized(config, ids, width, depth, heads, kv_heads, mlp, **more):
    """A configuration with the sizes of a published one."""
    return config | {
        "vocab_size": ids,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        **more,
    }


# What config.json says of Pythia-160m, Llama-3.2-1B, Qwen2-0.5B, Qwen3-0.6B, LLaDA-8B,
# Dream-7B and SDAR-8B, and the published number of parameters.
LLADA_8B = {
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "vocab_size": 126464,
    "embedding_size": 126464,
}
PUBLISHED = {
    ("gpt_neox", 162_322_944): sized(NEOX, 50304, 768, 12, 12, 12, 3072),
    ("llama", 1_235_814_400): sized(
        LLAMA, 128256, 2048, 16, 32, 8, 8192, head_dim=64, tie_word_embeddings=True
    ),
    ("qwen2", 494_032_768): sized(QWEN2, 151936, 896, 24, 14, 2, 4864),
    ("qwen3", 596_049_920): sized(QWEN2, 151936, 1024, 28, 16, 8, 3072, head_dim=128),
    ("llada", 8_015_581_184): LLADA | LLADA_8B,
    ("Dream", 7_615_616_512): sized(DREAM, 152064, 3584, 28, 28, 4, 18944),
    ("sdar", 8_190_735_360): sized(SDAR, 151936, 4096, 36, 32, 8, 12288, head_dim=128),
}


@pytest.mark.parametrize("family, count", PUBLISHED)
def test_published_sizes(family, count):
    fields = converter.FAMILIES[family].fields(Values(PUBLISHED[family, count]))
    found = lm.abstract_params(LMConfig(family=family, known_ids=1, **fields))
    assert sum(leaf.size for leaf in jax.tree.leaves(found)) == count


def test_padded_vocabulary_and_end_of_text(tmp_path):
    pieces = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}},
        "added_tokens": [{"id": 7, "content": "<e>"}],
    }
    others = {
        "tokenizer.json": pieces,
        "generation_config.json": {"eos_token_id": [2, 9, 2]},
    }
    config = make_config(open_source(write(tmp_path / "x", LLAMA, others=others)))
    assert (config.known_ids, config.vocab_size) == (8, V)
    assert (config.bos_ids, config.eos_ids) == ((1,), (2, 9))
    unigram = {"model": {"vocab": [["a", 0.0]] * 50}}
    folder = write(tmp_path / "y", LLAMA, others={"tokenizer.json": unigram})
    assert make_config(open_source(folder)).known_ids == V


def test_files_outside_the_folder_are_refused(tmp_path):
    folder = write(tmp_path / "x", LLAMA, files=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-', '"../model-'))
    with pytest.raises(UserError, match="which is not in the folder"):
        open_source(folder)
