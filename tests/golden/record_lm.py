"""Records small random language models of the transformers library and their logits,
for tests without it.

    # Writes lm_FAMILY.zip beside itself; needs torch and transformers 5.
    python tests/golden/record_lm.py

Each file holds, per case, the folder that `save_pretrained` writes (float16 weights)
and `logits.npz`: token ids and the logits that these weights give in float32.
Masked-diffusion models are another family's, under their names and read with a full
mask, or with one that is causal between blocks.
"""

import copy
import io
import json
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import transformers

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CLASSES = {"gpt_neox": "GPTNeoX", "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def rope(theta=1e4, **how):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **how}}


CASES = {
    ("gpt_neox", "parallel"): rope(partial_rotary_factor=0.25),
    ("gpt_neox", "sequential"): {
        **rope(partial_rotary_factor=0.5),
        "use_parallel_residual": False,
        "hidden_act": "gelu_new",
    },
    ("llama", "plain"): rope(),
    ("llama", "llama3"): {
        **rope(5e5, **LLAMA3),
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    ("llama", "linear"): {
        **rope(rope_type="linear", factor=4.0),
        "num_key_value_heads": 1,
        "head_dim": 6,
        "attention_bias": True,
        "mlp_bias": True,
    },
    ("qwen2", "tied"): {
        **rope(1e6),
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    ("qwen2", "untied"): {
        **rope(1e6),
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
    },
    ("qwen3", "tied"): {
        **rope(1e6),
        "num_key_value_heads": 2,
        "head_dim": 12,
        "tie_word_embeddings": True,
    },
    ("qwen3", "biases"): {
        **rope(1e6),
        "num_key_value_heads": 1,
        "head_dim": 8,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
}
DREAM = {**rope(1e6), "num_key_value_heads": 2, "tie_word_embeddings": False}
LLADA = {**rope(5e5), "rms_norm_eps": 1e-5}
# name: the network, its options, the length of a block, whether predictions are shifted
MASKED = {
    "llada": ("llama", LLADA, 24, False),
    "dream": ("qwen2", DREAM, 24, True),
    "sdar": ("qwen3", {**DREAM, "head_dim": 12}, 4, False),
    "fast_dllm": ("qwen2", DREAM, 8, True),
}
PUBLISHED = {
    "dream": {
        "model_type": "Dream",
        "architectures": ["DreamModel"],
        "auto_map": {"AutoModel": "modeling_dream.DreamModel"},
    },
    "sdar": {
        "model_type": "sdar",
        "architectures": ["SDARForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"},
        "block_size": 4,
    },
    "fast_dllm": {
        "model_type": "Fast_dLLM_Qwen",
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM"},
        "bd_size": 8,
    },
}
LLADA_NAMES = {
    "model.layers.": "model.transformer.blocks.",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
}
LLADA_CONFIG = {
    "model_type": "llada",
    "architectures": ["LLaDAModelLM"],
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "mlp_hidden_size": 48,
    "vocab_size": 64,
    "embedding_size": 64,
    "rms_norm_eps": 1e-5,
    "max_sequence_length": 128,
    "rope_theta": 5e5,
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "rope": True,
    "alibi": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "weight_tying": False,
    "scale_logits": False,
    "eos_token_id": 1,
    "auto_map": {"AutoModelForCausalLM": "modeling_llada.LLaDAModelLM"},
}


@torch.no_grad()
def random_model(family, options, seed):
    """A model of random weights, large enough for logits of a few units, that float16
    holds exactly."""
    config = getattr(transformers, f"{CLASSES[family]}Config")(**SIZES, **options)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.add_(0.25 * torch.randn(parameter.shape))
    # `model.half()` would round the rotary frequencies as well
    for parameter in model.parameters():
        parameter.copy_(parameter.half())
    return model


def save_masked(family, model, folder):
    """The folder that this model would be published in."""
    tensors = model.state_dict()
    config = LLADA_CONFIG
    if family in PUBLISHED:
        config = model.config.to_dict() | PUBLISHED[family]
    else:
        for theirs, ours in LLADA_NAMES.items():
            tensors = {
                name.replace(theirs, ours): tensor for name, tensor in tensors.items()
            }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"mask_token_id": 63}))
    safetensors.torch.save_file(
        {n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors"
    )


def add(archive, case, folder, **arrays):
    """With a fixed date, so that the same models give the same file."""
    np.savez(content := io.BytesIO(), **arrays)
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    for name, data in {**files, "logits.npz": content.getvalue()}.items():
        entry = zipfile.ZipInfo(f"{case}/{name}", (2025, 1, 1, 0, 0, 0))
        archive.writestr(entry, data, zipfile.ZIP_DEFLATED)


@torch.no_grad()
def main(scratch):
    tokens = np.random.default_rng(0).integers(0, 64, (2, 24))
    ids = torch.as_tensor(tokens)
    archives = {
        f: zipfile.ZipFile(HERE / f"lm_{f}.zip", "w") for f in (*CLASSES, *MASKED)
    }
    for seed, ((family, case), options) in enumerate(CASES.items(), 1):
        model = random_model(family, options, seed)
        folder = scratch / f"{family}-{case}"
        shards = {"max_shard_size": "20KB"} if case == "untied" else {}
        copy.deepcopy(model).half().save_pretrained(folder, **shards)
        logits = model(ids).logits.numpy()
        add(
            archives[family],
            case,
            folder,
            tokens=tokens.astype(np.uint8),
            logits=logits,
        )
    for family, (of, options, block, shifted) in MASKED.items():
        model = random_model(of, options, 105)
        folder = scratch / family
        save_masked(family, copy.deepcopy(model).half(), folder)
        of_block = torch.arange(24) // block
        hidden = of_block[:, None] < of_block
        mask = torch.where(hidden, torch.finfo(torch.float32).min, 0.0)
        mask = mask.expand(2, 1, 24, 24)
        logits = model(ids, attention_mask=mask).logits.numpy()
        if shifted:  # their sampling loops shift them
            logits = np.concatenate([logits[:, :1], logits[:, :-1]], axis=1)
        add(
            archives[family],
            "masked",
            folder,
            tokens=tokens.astype(np.uint8),
            logits=logits,
        )
    for archive in archives.values():
        archive.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
