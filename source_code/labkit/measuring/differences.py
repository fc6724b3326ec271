# SPDX-License-Identifier: BSD-3-Clause
"""Compare two runs element by element, so that NaN and infinity count as differences.

Python's ``max`` skips a NaN unless it comes first, because ``nan > x`` is False: the largest difference of a run that
diverged comes out as 0. Every comparison in the course goes through ``largest_difference`` instead.
"""

import numpy as np
import torch


def largest_difference(measured, reference, relative: bool = False) -> float:
    """Return the largest absolute difference between two equally long collections of numbers.

    Args:
        measured: a number, a tensor, an array, or a sequence of these, nested as deep as you like.
        reference: the same number of elements, in the same order.
        relative: divide each difference by the magnitude of the reference element; 0/0 counts as 0.

    Returns:
        NaN if a difference is NaN (an element is NaN, or both are infinite), else infinity if one is infinite, else
        the largest, in the unit of the elements or as a share.

    Raises:
        ValueError: the lengths differ, or there is nothing to compare.
    """
    measured, reference = _elements(measured), _elements(reference)
    if measured.shape != reference.shape:
        raise ValueError(f"{measured.size} elements cannot be compared with {reference.size}")
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        differences = np.abs(measured - reference)
        if relative:
            differences = np.where(differences == 0, 0.0, differences / np.abs(reference))
    return largest(differences)


def largest(values) -> float:
    """Return the largest of a collection of numbers, or NaN if it contains one.

    Raises:
        ValueError: there are no values.
    """
    values = _elements(values)
    if not values.size:
        raise ValueError("there is nothing to compare")
    return float(values.max())  # unlike Python's, NumPy's max returns NaN if there is one


def smallest(values) -> float:
    """Return the smallest of a collection of numbers, or NaN if it contains one.

    Raises:
        ValueError: there are no values.
    """
    return -largest(-_elements(values))


def _elements(values) -> np.ndarray:
    """Return all elements of a nested collection as one float64 vector."""
    if isinstance(values, torch.Tensor):
        return values.detach().to("cpu", torch.float64).numpy().ravel()
    if isinstance(values, (str, bytes, dict)):
        raise TypeError(f"{type(values).__name__} is not a sequence of numbers")
    if hasattr(values, "__iter__") and not hasattr(values, "__array__"):
        parts = [_elements(each) for each in values]
        return np.concatenate(parts) if parts else np.empty(0)
    return np.asarray(values, dtype=np.float64).ravel()
