# SPDX-License-Identifier: BSD-3-Clause
"""Apply tensor parallelism with sequence parallelism (arXiv:2205.05198) to the GPT."""

from torch.distributed.tensor import Replicate, Shard, parallel


def tensor_parallel(model, mesh):
    """Shard every matmul among the ranks of ``mesh``, and the activations between them along the sequence, in place.

    The inputs of attention and of the feed-forward network are all-gathered, and their outputs reduce-scattered. A rank
    has some of the heads, of the intermediate size, and of the vocabulary.

    Args:
        model: a ``GPT``.
        mesh: a one-dimensional device mesh, whose ranks train on the same sequences.
    """
    sequence, whole = Shard(1), Replicate()  # of an activation (batch, sequence, hidden_size)
    norm = parallel.SequenceParallel()
    columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel(output_layouts=sequence)
    block = {
        "attention_norm": norm,
        "attention": parallel.PrepareModuleInput(input_layouts=(sequence, None), desired_input_layouts=(whole, None)),
        "attention.query": columns,
        "attention.key": columns,
        "attention.value": columns,
        "attention.output": rows,
        "feed_forward_norm": norm,
        "feed_forward": parallel.PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
        "feed_forward.gate": columns,
        "feed_forward.up": columns,
        "feed_forward.down": rows,
    }
    plan = {
        "embedding": parallel.RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "norm": norm,
        # The logits stay sharded: compute_loss does not need them gathered.
        "head": parallel.ColwiseParallel(input_layouts=sequence, use_local_output=False),
    }
    parallel.parallelize_module(model, mesh, plan | {f"blocks.*.{name}": style for name, style in block.items()})
    model.tie()  # the styles have given embedding and head separate parameters
