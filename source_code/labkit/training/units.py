# SPDX-License-Identifier: BSD-3-Clause
"""Choose the FSDP units of a model: its wrapping policy."""

from torch import nn


def units_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules that become FSDP units: the members of the outermost ModuleLists, each once.

    A list inside a member, such as the experts of a block, is gathered with it. A member that is itself a list has no
    forward: its members become units instead.
    """
    units = []
    for child in module.children():
        is_unit = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)
        units += [child] if is_unit else units_of(child)
    return list(dict.fromkeys(units))
