"""Small language models as GGUF files, and the same weights under Hugging Face's names.

Rows of queries and keys are exchanged as the format's published converter does it: in a
llama file the two dimensions that are rotated together lie side by side.
"""

import gguf
import hf_folder
import numpy as np

# Ids, width, layers, heads, key-value heads, width of the MLP.
V = 264
D = 32
L = 2
H = 4
KV = 2
M = 64
SPECIAL = ("<|start|>", "<|end|>")
MERGES = ("h e", "l l", "he ll", "hell o")
QWEN2 = hf_folder.QWEN2 | {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": M,
    "rms_norm_eps": 2.0**-20,
    "bos_token_id": 260,
    "eos_token_id": 261,
}
LLAMA = {
    **QWEN2,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def weights(config):
    """Random tensors under Hugging Face's names, float16 numbers in float32."""
    return {
        name: array.astype(np.float16).astype(np.float32)
        for name, array in hf_folder.tensors(config).items()
    }


def ordered(config, name, array):
    """A tensor with its rows in the order of the format."""
    heads = {"q_proj": H, "k_proj": KV}.get(name.split(".")[-2])
    if config["model_type"] != "llama" or heads is None:
        return array
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def tokens():
    """256 characters that stand for bytes, what the merges make, special tokens, and
    unused ids."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [i for i in range(256) if i not in printable]
    bytes_ = [*map(chr, printable), *(chr(256 + n) for n in range(len(others)))]
    made = [merge.replace(" ", "") for merge in MERGES]
    unused = [f"[PAD{i}]" for i in range(V - 256 - len(made) - len(SPECIAL))]
    return [*bytes_, *made, *SPECIAL, *unused]


def metadata(config):
    """The entries of a model with this configuration, but for general.architecture."""
    a = config["model_type"]
    types = [1] * 260 + [3] * len(SPECIAL) + [5] * (V - 260 - len(SPECIAL))
    return {
        f"{a}.block_count": L,
        f"{a}.context_length": 64,
        f"{a}.embedding_length": D,
        f"{a}.feed_forward_length": M,
        f"{a}.attention.head_count": H,
        f"{a}.attention.head_count_kv": KV,
        f"{a}.rope.freq_base": config["rope_theta"],
        f"{a}.rope.dimension_count": D // H,
        f"{a}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{a}.vocab_size": V,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": {"llama": "smollm"}.get(a, a),
        "tokenizer.ggml.tokens": tokens(),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 260,
        "tokenizer.ggml.eos_token_id": 261,
        "tokenizer.chat_template": "{{ messages }}",
    }


def write(path, config, tensors, storage="F32", **changes):
    """A file with these tensors, the matrices stored as said; changes: metadata entries
    or tensors to add."""
    kind = gguf.GGMLQuantizationType[storage]
    family = config["model_type"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], L)
    writer = gguf.GGUFWriter(path, family)
    for key, value in (metadata(config) | changes).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        else:
            kinds = {
                bool: "bool",
                int: "uint32",
                float: "float32",
                str: "string",
                list: "array",
            }
            getattr(writer, f"add_{kinds[type(value)]}")(key, value)
    for name, array in tensors.items():
        array = ordered(config, name, array)
        name = names.get_name(name, (".weight", ".bias"))
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
