# SPDX-License-Identifier: BSD-3-Clause
"""Choose the parameters to which AdamW applies weight decay."""


def parameter_groups(model, config) -> list[dict]:
    """Return the trained parameters as one or two parameter groups for AdamW, each with its weight decay.

    With ``--no-decay-1d`` norms and biases, which have one dimension, are not decayed; matrices are, including embeddings
    (as in nanoGPT). A sharded parameter (DTensor) has as many dimensions as the unsharded one; FSDP1's flat parameters do
    not. The planner assumes one group. With two groups, AdamW's intermediate results exist for one at a time, so that the
    optimizer's step needs up to the smaller group's bytes less than planned.

    Args:
        model: The model, after sharding.
        config: Has ``weight_decay`` and ``decay_1d``.
    """
    return groups_of([parameter for parameter in model.parameters() if parameter.requires_grad], config)


def groups_of(trained: list, config) -> list[dict]:
    """Return these parameters as one or two parameter groups: see ``parameter_groups``."""
    decayed = [parameter for parameter in trained if config.decay_1d or parameter.ndim > 1]
    others = [parameter for parameter in trained if not (config.decay_1d or parameter.ndim > 1)]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def by_mesh(group: dict) -> list[dict]:
    """Divide a parameter group into one for each device mesh of its parameters; plain tensors have none."""
    meshes = {}
    for parameter in group["params"]:
        meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [group | {"params": parameters} for parameters in meshes.values()]
