"""Tiny random model folders in the Hugging Face format."""

import json

import numpy as np
from safetensors.numpy import save_file

from cspd_jax.converters import lm
from cspd_jax.converters.hf import Values
from cspd_jax.networks.lm import LMConfig

# Ids, width, layers, heads, key-value heads, width of the MLP.
V = 40
D = 16
L = 2
H = 4
KV = 2
M = 24

SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "intermediate_size": M,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
}
NEOX = {
    **SIZES,
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "num_attention_heads": 2,
    "hidden_act": "gelu",
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
    "use_parallel_residual": True,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = {
    **SIZES,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": KV,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
QWEN2 = {
    **SIZES,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_key_value_heads": KV,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 64,
    "max_window_layers": 1,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 6,
}
LLADA = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "d_model": D,
    "n_layers": L,
    "n_heads": H,
    "n_kv_heads": H,
    "mlp_hidden_size": M,
    "vocab_size": V,
    "embedding_size": V,
    "max_sequence_length": 64,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "activation_type": "silu",
    "include_qkv_bias": False,
    "weight_tying": False,
    "eos_token_id": 3,
    "mask_token_id": 9,
    "auto_map": {"AutoModelForCausalLM": "modeling_llada.LLaDAModelLM"},
}
DREAM = {
    **QWEN2,
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "tie_word_embeddings": False,
    "mask_token_id": 8,
    "auto_map": {"AutoModel": "modeling_dream.DreamModel"},
}
SDAR = {
    **QWEN2,
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "tie_word_embeddings": False,
    "mask_token_id": 8,
    "block_size": 4,
    "auto_map": {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"},
}
FAST_DLLM = {
    **QWEN2,
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "model_type": "Fast_dLLM_Qwen",
    "bd_size": 8,
    "auto_map": {"AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM"},
}
CONFIGS = {"gpt_neox": NEOX, "llama": LLAMA, "qwen2": QWEN2}


def tensors(config):
    """Random float32 tensors under the family's names, which recorded models vouch
    for."""
    rng = np.random.default_rng(0)
    family = config["model_type"]
    fields = lm.FAMILIES[family].fields(Values(config))
    wanted = lm.FORMAT.wanted(LMConfig(family=family, known_ids=1, **fields))
    shapes = {entry.name: entry.source_shape for entry in wanted}
    return {
        name: 0.2 * rng.standard_normal(shape, np.float32)
        for name, shape in shapes.items()
    }


def write(path, config, weights=None, files=1, others=None):
    """The folder `path`, its tensors in `files` files, and other JSON files by name."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name, content in (others or {}).items():
        (path / name).write_text(json.dumps(content))
    weights = tensors(config) if weights is None else weights
    names = list(weights)
    where = {}
    for n in range(files):
        part = f"-{n + 1:05}-of-{files:05}" if files > 1 else ""
        file = f"model{part}.safetensors"
        save_file({name: weights[name] for name in names[n::files]}, path / file)
        where |= dict.fromkeys(names[n::files], file)
    if files > 1:
        (path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": where})
        )
    return path
