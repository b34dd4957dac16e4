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
    left_out = LLADA | {
        "n_kv_heads": None,
        "mlp_hidden_size": None,
        "mlp_ratio": 1.5,
        "embedding_size": None,
    }
    assert (
        make_config(open_source(write(tmp_path / "short", left_out, tensors(LLADA))))
        == whole
    )
    assert (whole.causal, whole.mask_ids, whole.eos_ids) == (False, (9,), (3,))
    dream, qwen2, sdar, fast = (
        make_config(open_source(write(tmp_path / c["model_type"], c)))
        for c in (DREAM, QWEN2, SDAR, FAST_DLLM | {"mask_token_id": 8})
    )
    assert (sdar.causal, sdar.block, sdar.shifted, sdar.mask_ids) == (
        False,
        4,
        False,
        (8,),
    )
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


# What config.json says of Pythia-160m, Llama-3.2-1B, Qwen2-0.5B, Qwen3-0.6B, LLaDA-8B,
# Dream-7B and SDAR-8B, and the published number of parameters.
PUBLISHED = {
    ("gpt_neox", 162_322_944): CONFIGS["gpt_neox"]
    | {
        "vocab_size": 50304,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    ("llama", 1_235_814_400): LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
    ("qwen2", 494_032_768): QWEN2
    | {
        "vocab_size": 151936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
    },
    ("qwen3", 596_049_920): QWEN2
    | {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
    },
    ("llada", 8_015_581_184): LLADA
    | {
        "d_model": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 32,
        "mlp_hidden_size": 12288,
        "vocab_size": 126464,
        "embedding_size": 126464,
    },
    ("Dream", 7_615_616_512): DREAM
    | {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "vocab_size": 152064,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
    },
    ("sdar", 8_190_735_360): SDAR
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "head_dim": 128,
        "num_attention_heads": 32,
        "vocab_size": 151936,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
    },
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
    config = make_config(
        open_source(write(tmp_path / "y", LLAMA, others={"tokenizer.json": unigram}))
    )
    assert config.known_ids == V


def test_files_outside_the_folder_are_refused(tmp_path):
    folder = write(tmp_path / "x", LLAMA, files=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-', '"../model-'))
    with pytest.raises(UserError, match="which is not in the folder"):
        open_source(folder)
