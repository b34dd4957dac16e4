"""The one exception that means: the caller's input is wrong."""


class UserError(ValueError):
    """One sentence: what is wrong, where, and what would be right. The command line exits with 2."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether XLA says by it that the device has too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error)
