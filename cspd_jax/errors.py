"""The one exception that means: the caller's input is wrong."""


class UserError(ValueError):
    """One sentence: what is wrong, where, and what would be right. The command line exits with 2."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether XLA found too little memory on the device."""
    return "RESOURCE_EXHAUSTED" in str(error) and "RuntimeError" in type(error).__name__
