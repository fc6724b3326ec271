# SPDX-License-Identifier: BSD-3-Clause
"""Replace attributes of a module or a class for as long as a context lasts."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def replaced(owner, **values) -> Iterator[None]:
    """Set attributes of ``owner`` within the context, and restore them at its end.

    Args:
        owner: a module or a class that has all of these attributes.
        values: {attribute: its value within the context}.
    """
    # Of a class, what it has itself: ``getattr`` would bind a class method.
    before = {name: vars(owner).get(name, getattr(owner, name)) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
