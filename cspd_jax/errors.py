"""The one exception that means: the caller's input is wrong."""


class UserError(ValueError):
    """One sentence: what is wrong, where, and what would be right. The command line exits with 2."""
