"""The plan by which tensor parallelism splits the GPT, with sequence parallelism (arXiv:2205.05198)."""

from torch.distributed.tensor import Replicate, Shard, parallel


def tensor_parallel(model, mesh):
    """Split every matrix product among the ranks of ``mesh``, and between the products the sequence: on a mesh of one
    dimension, whose ranks see the same sequences.

    What comes into attention and into the feed-forward part is gathered, and what comes out is summed and split again.
    A rank has some of the heads, some of the hidden numbers, and some of the vocabulary.
    """
    sequence, whole = Shard(1), Replicate()  # of an activation (batch, sequence, width)
    normalise = parallel.SequenceParallel()
    columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel(output_layouts=sequence)
    block = {
        "attention_norm": normalise,
        "attention": parallel.PrepareModuleInput(input_layouts=(sequence, None), desired_input_layouts=(whole, None)),
        "attention.query": columns,
        "attention.key": columns,
        "attention.value": columns,
        "attention.output": rows,
        "feed_forward_norm": normalise,
        "feed_forward": parallel.PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
        "feed_forward.gate": columns,
        "feed_forward.up": columns,
        "feed_forward.down": rows,
    }
    plan = {
        "embedding": parallel.RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "norm": normalise,
        # The logits stay split, for compute_loss: nobody needs them whole.
        "head": parallel.ColwiseParallel(input_layouts=sequence, use_local_output=False),
    }
    parallel.parallelize_module(model, mesh, plan | {f"blocks.*.{name}": style for name, style in block.items()})
    model.tie()  # the styles have given embedding and head a parameter each
