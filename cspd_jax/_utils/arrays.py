"""Lists and arrays that a caller gives, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_array(values: Any) -> np.ndarray:
    """A list or an array as numpy has it; ValueError for lists of several lengths, keys, deleted arrays,
    bytes, and arrays with entries that are masked out, whose values numpy would take."""
    if isinstance(values, bytes | bytearray | memoryview | np.ma.MaskedArray):
        raise ValueError("neither a list nor an array")
    try:
        return np.asarray(values)
    except (TypeError, RuntimeError, OverflowError) as error:  # keys, arrays that have been deleted
        if type(error).__name__ == "TracerArrayConversionError":
            raise
        raise ValueError("neither a list nor an array of numbers") from None


def whole_numbers(values: Any) -> np.ndarray:
    """`as_array` of whole numbers of any size; ValueError for others."""
    array = as_array(values)
    if array.dtype.name in ("int2", "uint2", "int4", "uint4"):  # ml_dtypes', which numpy knows little of
        array = array.astype(np.int8)
    whole = array.dtype.kind in "iu" or (array.dtype == object and all(type(v) is int for v in array.flat))
    if array.size and not whole:
        raise ValueError("not whole numbers")
    return array
