# SPDX-License-Identifier: BSD-3-Clause
"""Networks as blueprints: their parameters, and their operators on sizes. Imports no torch.

A blueprint states what labkit/training/models.py computes, line for line; tests hold the two together. Those of third-party
models state what the modules of transformers compute (planner/models/library.py).
"""

from math import prod

from planner.models.blueprint import AbstractModule, Blueprint
from planner.models.gpt import GPT
from planner.models.library import LibraryGPT
from planner.models.shapes import GPTShape
from planner.ops.autograd import INT64
from planner.ops.context import Context
from planner.ops.routing import Routing

# The MNIST network (labkit/training/models.py: Net)

LAYERS = {
    "conv1": {"conv1.weight": (32, 1, 3, 3), "conv1.bias": (32,)},
    "conv2": {"conv2.weight": (64, 32, 3, 3), "conv2.bias": (64,)},
    "fc1": {"fc1.weight": (128, 9216), "fc1.bias": (128,)},
    "fc2": {"fc2.weight": (10, 128), "fc2.bias": (10,)},
}
IMAGE, POOLED = 28 * 28, 64 * 12 * 12  # elements per image


def mnist(batch: int = 64, dropout: bool = True, min_num_params: int | None = None) -> Blueprint:
    """Return the blueprint of the MNIST network.

    Args:
        batch: images on each rank.
        dropout: whether training drops elements.
        min_num_params: layers with at least this many parameters are units of their own; None: no layer is.
    """

    def layer(name, forward):
        numel = sum(map(prod, LAYERS[name].values()))
        wrapped = min_num_params is not None and numel >= min_num_params
        return AbstractModule(name, LAYERS[name], forward, wrapped=wrapped)

    def pooling(tape, x, _):
        x = tape.max_pool(x, batch * POOLED)
        return tape.dropout(x, "dropout1") if dropout else x

    def hidden(tape, x, _):
        x = tape.relu(x, "relu3")
        return tape.dropout(x, "dropout2") if dropout else x

    def make_batch(tape, count, itemsize):
        return tape.constant("images", batch * IMAGE, itemsize, count), tape.constant("labels", batch, INT64, count)

    modules = (
        layer("conv1", lambda tape, x, p: tape.convolution(x, p["conv1.weight"], p["conv1.bias"], batch * 26 * 26)),
        AbstractModule("relu1", {}, lambda tape, x, _: tape.relu(x, "relu1")),
        layer("conv2", lambda tape, x, p: tape.convolution(x, p["conv2.weight"], p["conv2.bias"], batch * 24 * 24)),
        AbstractModule("relu2", {}, lambda tape, x, _: tape.relu(x, "relu2")),
        AbstractModule("pooling", {}, pooling),
        layer("fc1", lambda tape, x, p: tape.linear(x, p["fc1.weight"], p["fc1.bias"])),
        AbstractModule("relu3", {}, hidden),
        layer("fc2", lambda tape, x, p: tape.linear(x, p["fc2.weight"], p["fc2.bias"])),
        AbstractModule("log-softmax", {}, lambda tape, x, _: tape.log_softmax(x)),
    )
    return Blueprint(
        name="MNIST net",
        modules=modules,
        batch=make_batch,
        loss=lambda tape, x, targets, itemsize: tape.nll_loss(tape.to(x, itemsize), targets),
        samples=batch,
        flops=0.0,
        holds_output=True,
    )


# Transformers

# What backward recomputes in a block: nothing; everything; everything except matmuls and attention; everything except
# every second matmul, and attention.
RECOMPUTE = ("none", "full", "selective", "alternate")


def gpt(
    shape: GPTShape,
    batch_size: int,
    seq_len: int,
    recompute: str = "none",
    lora: int | None = None,
    *,
    tp_degree: int = 1,
    blocks: range | None = None,
    recompute_every: int = 1,
    loss_chunks: int = 1,
    wrap_embeddings: bool = False,
    quantized: bool = False,
    offload_activations: bool = False,
    context: Context | None = None,
    ep_degree: int = 1,
    routing: Routing | None = None,
) -> Blueprint:
    """Return the blueprint of a GPT for one rank's batch.

    Args:
        shape: the model's sizes.
        batch_size: sequences on each rank.
        seq_len: tokens of a sequence.
        recompute: what backward recomputes, one of ``RECOMPUTE``.
        lora: the adapters' rank; then they alone are trained.
        tp_degree: ranks that split every weight, and the sequence between the linear layers; they see the same sequences.
        blocks: those of a pipeline stage; the first stage also has the embedding, the last the head. By default all.
        recompute_every: recompute one block in this many, beginning with the first.
        loss_chunks: chunks of the tokens for which the head computes logits and loss, one after another.
        wrap_embeddings: FSDP makes units of embedding and head.
        quantized: with adapters, the matrices of the blocks are stored in 4 bits (QLoRA, arXiv:2305.14314).
        offload_activations: the inputs of recomputed blocks are in CPU memory from their forward to their backward.
        context: the ranks that share each sequence; None: each rank has its own.
        ep_degree: ranks that have different experts.
        routing: the rows of this rank; by default those expected if each token chooses its experts uniformly.

    Raises:
        UserError: the model cannot be split among ``tp_degree`` ranks, or the options do not go together.
    """
    computes = LibraryGPT if shape.library else GPT
    return computes(
        shape,
        batch_size,
        seq_len,
        recompute=recompute,
        lora=lora,
        tp_degree=tp_degree,
        stage=blocks or range(shape.num_hidden_layers),
        recompute_every=recompute_every,
        loss_chunks=loss_chunks,
        wrap_embeddings=wrap_embeddings,
        quantized=quantized,
        offload_activations=offload_activations,
        context=context or Context(),
        ep_degree=ep_degree,
        routing=routing,
    ).blueprint()
