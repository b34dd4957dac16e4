"""Converts the tokenizer in a GGUF file's metadata to Hugging Face's tokenizer.json and
tokenizer_config.json.

Only byte-level byte-pair encoding is converted. The metadata has a name for the rule by
which a text is split before it is encoded, and `_SPLITS` has the rule for each name. A
file with another kind of tokenizer is converted without its tokenizer.
"""

from __future__ import annotations

import json

import numpy as np

from cspd_jax.check import shown
from cspd_jax.converters.hf import Values

# Types of tokens in the metadata.
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _by_pattern(pattern: str) -> list[dict[str, object]]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [split, _byte_level(use_regex=False)]


def _byte_level(use_regex: bool) -> dict[str, object]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


# The metadata's name -> the steps of splitting. With `use_regex`, ByteLevel splits by
# GPT-2's pattern.
_SPLITS = {
    "gpt-2": [_byte_level(use_regex=True)],
    "default": [_byte_level(use_regex=True)],
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        _byte_level(use_regex=True),
    ],
    "qwen2": _by_pattern(_WORDS % ""),
    "llama-bpe": _by_pattern(_WORDS % "{1,3}"),
}


def files(metadata: Values) -> dict[str, bytes]:
    """Returns the contents of tokenizer.json and tokenizer_config.json by name. Returns
    {} if the tokenizer cannot be converted (see `missing`)."""
    if missing(metadata) is not None:
        return {}
    written = {
        "tokenizer.json": _tokenizer(metadata),
        "tokenizer_config.json": _settings(metadata),
    }
    return {
        name: json.dumps(value, ensure_ascii=False).encode()
        for name, value in written.items()
    }


def missing(metadata: Values) -> str | None:
    """Returns the reason why a file is converted without a tokenizer; None if its
    tokenizer can be converted."""
    model = metadata.get("tokenizer.ggml.model")
    split = metadata.get("tokenizer.ggml.pre", "default")
    if model is None:
        return "the file has no tokenizer"
    if model != "gpt2":
        return (
            f"the file's tokenizer is of kind {shown(model)}, and only gpt2"
            " (byte-level BPE) is converted"
        )
    if split not in _SPLITS:
        return (
            f"the file's tokenizer splits texts by {shown(split)}; known are"
            f" {', '.join(_SPLITS)}"
        )
    return None


def known_ids(metadata: Values, vocab_size: int) -> int:
    """Returns 1 + the last id in use, at most vocab_size. If the metadata has no list
    of tokens, returns vocab_size."""
    if "tokenizer.ggml.tokens" not in metadata:
        return vocab_size
    return min(1 + int(np.flatnonzero(_types(metadata) != _UNUSED)[-1]), vocab_size)


def _types(metadata: Values) -> np.ndarray:
    """Returns the type of each token, [number of tokens]."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return np.array(metadata.get("tokenizer.ggml.token_type", [1] * len(tokens)))


def _tokenizer(metadata: Values) -> dict[str, object]:
    tokens = metadata["tokenizer.ggml.tokens"]
    types = _types(metadata)
    split = metadata.get("tokenizer.ggml.pre", "default")
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = np.flatnonzero((types == _CONTROL) | (types == _USER_DEFINED)).tolist()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": tokens[i],
                **plain,
                "special": bool(types[i] == _CONTROL),
            }
            for i in added
        ],
        "normalizer": {"type": "NFC"} if split == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _SPLITS[split]},
        "post_processor": _beginning(metadata, split),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": split == "llama-bpe",
            "vocab": {tokens[i]: i for i in np.flatnonzero(types != _UNUSED).tolist()},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }


def _beginning(metadata: Values, split: str) -> dict[str, object]:
    """Returns the post-processor, which puts the token that begins a text before the
    text. It does so if the metadata says so. If the metadata does not say, it does so
    for Llama 3 only."""
    plain = _byte_level(use_regex=True) | {"trim_offsets": False}
    if not metadata.get("tokenizer.ggml.add_bos_token", split == "llama-bpe"):
        return plain
    i = metadata["tokenizer.ggml.bos_token_id"]
    first = metadata["tokenizer.ggml.tokens"][i]

    def begun(text: str, n: int) -> list[dict[str, object]]:
        return [
            {"SpecialToken": {"id": first, "type_id": n}},
            {"Sequence": {"id": text, "type_id": n}},
        ]

    template = {
        "type": "TemplateProcessing",
        "single": begun("A", 0),
        "pair": begun("A", 0) + begun("B", 1),
        "special_tokens": {first: {"id": first, "ids": [i], "tokens": [first]}},
    }
    return {"type": "Sequence", "processors": [plain, template]}


def _settings(metadata: Values) -> dict[str, str]:
    """Returns tokenizer_config.json, which has the special tokens by their roles, and
    the chat template."""
    found = {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {
        "bos_token": "bos",
        "eos_token": "eos",
        "pad_token": "padding",
        "unk_token": "unknown",
    }
    for name, role in roles.items():
        for i in metadata.ids(f"tokenizer.ggml.{role}_token_id"):
            found[name] = tokens[i]
    if "tokenizer.chat_template" in metadata:
        found["chat_template"] = metadata["tokenizer.chat_template"]
    return found
