"""The course's networks as blueprints: their parameters, and their operators on sizes (planner/operators.py). No torch.

A blueprint says what labkit/training/models.py computes, line for line; tests hold the two together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from planner import UserError, chunked_loss, flops, tensor_parallel
from planner.attention import Heads
from planner.operators import Tape
from planner.shapes import GPTShape, block_parameters, norm_parameters, product_parameters
from planner.sizes import INT64, SizedParameter, SizedTensor
from planner.tensor_parallel import Exchange


@dataclass(frozen=True, eq=False)
class SizedModule:
    """A piece of a network that runs once in forward.

    parameters: {name: shape}, in the order in which they are registered; ``frozen`` names those not trained, and
    ``everywhere`` those that every rank of a tensor group has, where of the others it has its part, and ``packed``
    those of the frozen that are kept in 4 bits.
    forward(tape, x, parameters): computes on sizes. wrapped: FSDP makes a unit of it; the rest belongs to the root.
    with_next: so does this under FSDP1; FSDP2 makes one unit of it and the module that follows. again: what backward
    computes a second time, the products with so many parameters, and attention or not.
    """

    name: str
    parameters: dict[str, tuple]
    forward: Callable[[Tape, SizedTensor, dict[str, SizedParameter]], SizedTensor]
    wrapped: bool = False
    frozen: frozenset = frozenset()
    everywhere: frozenset = frozenset()
    packed: frozenset = frozenset()
    with_next: bool = False
    again: tuple[int, bool] = (0, False)

    @property
    def kind(self) -> str:
        """What its tensors are called in terms: "block" for each of a GPT's."""
        return self.name.split()[0]


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A network with its loss, for a batch of a given size on each rank; of tensor parallelism, one rank's part of it."""

    name: str
    modules: tuple[SizedModule, ...]
    batch: Callable[
        [Tape, int, int], tuple[SizedTensor, SizedTensor]
    ]  # (tape, micro-batches, bytes per number) → input, targets
    loss: Callable[[Tape, SizedTensor, SizedTensor, int], SizedTensor]  # of output, targets, bytes per number
    samples: int  # images or tokens in a micro-batch on a rank
    flops: float  # of forward and backward of one sample, without recomputation
    tied: dict[str, str] = field(default_factory=dict)  # a parameter → the one that it is
    tensor: Exchange = field(default_factory=Exchange)  # how many ranks share each product, and what they exchange
    period: int = 1  # of the wrapped modules, each is like the one so many before it
    flowing: int = 0  # numbers of a micro-batch between two blocks, and so between two stages of a pipeline
    holds_output: bool = False  # the training loop holds the network's output until the next step's is there

    @property
    def numel(self) -> int:
        """How many parameters the network has, on all ranks of a tensor group together."""
        return sum(
            prod(shape) * (1 if name in module.everywhere else self.tensor.parts)
            for module in self.modules
            for name, shape in module.parameters.items()
            if name not in self.tied
        )


# The MNIST network (labkit/training/models.py: Net)

LAYERS = {
    "conv1": {"conv1.weight": (32, 1, 3, 3), "conv1.bias": (32,)},
    "conv2": {"conv2.weight": (64, 32, 3, 3), "conv2.bias": (64,)},
    "fc1": {"fc1.weight": (128, 9216), "fc1.bias": (128,)},
    "fc2": {"fc2.weight": (10, 128), "fc2.bias": (10,)},
}
IMAGE, POOLED = 28 * 28, 64 * 12 * 12  # numbers an image


def mnist(batch: int = 64, dropout: bool = True, min_num_params: int | None = None) -> Blueprint:
    """batch: images on each rank. min_num_params: layers with at least as many parameters are units of their own."""

    def layer(name, forward):
        numel = sum(map(prod, LAYERS[name].values()))
        return SizedModule(name, LAYERS[name], forward, wrapped=min_num_params is not None and numel >= min_num_params)

    def pooling(tape, x, _):
        x = tape.max_pool(x, batch * POOLED)
        return tape.dropout(x, "dropout1") if dropout else x

    def hidden(tape, x, _):
        x = tape.relu(x, "relu3")
        return tape.dropout(x, "dropout2") if dropout else x

    def make_batch(tape, times, itemsize):
        return tape.given("images", batch * IMAGE, itemsize, times), tape.given("labels", batch, INT64, times)

    modules = (
        layer("conv1", lambda tape, x, p: tape.convolution(x, p["conv1.weight"], p["conv1.bias"], batch * 26 * 26)),
        SizedModule("relu1", {}, lambda tape, x, _: tape.relu(x, "relu1")),
        layer("conv2", lambda tape, x, p: tape.convolution(x, p["conv2.weight"], p["conv2.bias"], batch * 24 * 24)),
        SizedModule("relu2", {}, lambda tape, x, _: tape.relu(x, "relu2")),
        SizedModule("pooling", {}, pooling),
        layer("fc1", lambda tape, x, p: tape.linear(x, p["fc1.weight"], p["fc1.bias"])),
        SizedModule("relu3", {}, hidden),
        layer("fc2", lambda tape, x, p: tape.linear(x, p["fc2.weight"], p["fc2.bias"])),
        SizedModule("log-softmax", {}, lambda tape, x, _: tape.log_softmax(x)),
    )
    return Blueprint(
        "MNIST net",
        modules,
        make_batch,
        lambda tape, x, targets, itemsize: tape.nll_loss(tape.to(x, itemsize), targets),
        batch,
        0.0,
        holds_output=True,
    )


# The GPT (labkit/training/models.py: GPT)

# What backward computes again in a block: nothing; all of it; all but matrix products and attention; all but every
# second matrix product, and attention.
RECOMPUTE = ("none", "full", "selective", "alternate")


def gpt(
    shape: GPTShape,
    batch: int,
    length: int,
    recompute: str = "none",
    lora: int | None = None,
    tensor: int = 1,
    blocks: range | None = None,
    recompute_every: int = 1,
    loss_chunks: int = 1,
    apart: bool = False,
    packed: bool = False,
) -> Blueprint:
    """batch: sequences on each rank, of ``length`` tokens. recompute: one of ``RECOMPUTE``, for one block in so many.

    lora: the adapters' rank; then they alone are trained. tensor: among how many ranks each matrix product is split,
    and between the products the sequence; they see the same sequences. blocks: a pipeline's stage, which has these
    alone, and with the first of all the embedding, with the last the head. loss_chunks: for one in so many parts of the
    tokens at a time the head makes logits, and the loss. apart: embedding and head are units of their own for FSDP.
    packed: with adapters, the matrices of the blocks are kept in 4 bits (QLoRA, arXiv:2305.14314).
    UserError where ``tensor`` does not divide, or goes without what is given besides.
    """
    shape.check_split(tensor, length)
    if tensor > 1 and (lora or apart or loss_chunks > 1):
        raise UserError(
            "products split among ranks go without --lora, --wrap blocks+embeddings and --loss-chunks: leave them out"
        )
    if loss_chunks > 1 and (shape.softcap or "head" in shape.biases):
        raise UserError(
            "the loss in chunks is planned for a head without bias and soft-capping: leave --loss-chunks out"
        )
    blocks = blocks or range(shape.layers)
    tokens, in_block = batch * length, block_parameters(shape, lora, tensor)
    recomputed = [i for i in blocks if recompute != "none" and i % recompute_every == 0]

    def frozen(parameters):
        """With adapters, all but them."""
        return frozenset(name for name in parameters if lora and not name.endswith((".down", ".up")))

    def embedding(tape, x, p):
        x = tensor_parallel.embedding(tape, x, p["embedding.weight"], tensor)
        if shape.positions:
            return tape.add(x, tape.rows(x, p["positions.weight"], length), "embedding, with positions")
        return positions(tape, tensor_parallel.scatter(tape, x, tensor, batch), p)

    def positions(tape, x, _):
        size = length * shape.in_head, x.itemsize
        tape.tables = [tape.given(name, *size) for name in ("cosines", "sines")]
        return x

    def call_block(tape, x, p):
        heads = Heads(batch, shape.heads // tensor, shape.kv_heads // tensor, length)
        return _block(tape, x, p, heads, tensor, shape)

    def call_recomputed(tape, x, p):
        return tape.recomputed(lambda x: call_block(tape, x, p), x, recompute)

    def block(i):
        forward, again = call_block, (0, False)
        if i in recomputed:
            forward, again = call_recomputed, flops.again(shape, recompute, lora)
        return SizedModule(f"block {i}", in_block, forward, True, frozen(in_block), norms, matrices, again=again)

    def norm(tape, x, p):
        return tensor_parallel.gather(tape, _norm(tape, x, p, "norm"), tensor, batch)

    def head(tape, x, p):
        if loss_chunks > 1:
            return chunked_loss.chunked_loss(tape, x, p["head.weight"], loss_chunks)
        x = tape.linear(x, p["head.weight"], p.get("head.bias"))
        return tape.softcap(x) if shape.softcap else x

    def norm_and_head(tape, x, p):
        return head(tape, norm(tape, x, p), p)

    def make_batch(tape, times, _):
        return tape.given("tokens", tokens, INT64, times), tape.given("targets", tokens, INT64, times)

    def loss(tape, output, targets, itemsize):
        if loss_chunks == 1:
            output = tensor_parallel.cross_entropy(tape, tape.to(output, itemsize, "logits"), targets, tensor)
        return tape.divide(output, "loss, divided by micro-batches")

    outer = {"embedding.weight": (shape.vocabulary // tensor, shape.width)}
    if shape.positions:
        outer["positions.weight"] = (shape.positions, shape.width)
    of_norm = norm_parameters(shape, "norm")
    of_head = product_parameters(shape, "head", shape.vocabulary // tensor, shape.width)
    last = of_norm | of_head
    matrices = frozenset(n for n in frozen(in_block) if packed and len(in_block[n]) > 1)
    norms = frozenset(name for name in (in_block | last) if name.endswith("norm.weight"))
    end = [SizedModule("head", last, norm_and_head, frozen=frozen(last), everywhere=norms)]
    if apart:
        end = [SizedModule("norm", of_norm, norm, frozen=frozen(of_norm), with_next=True)]
        end.append(SizedModule("head", of_head, head, wrapped=True, frozen=frozen(of_head)))
    return Blueprint(
        name="GPT",
        modules=(
            SizedModule("embedding", outer, embedding, wrapped=apart, frozen=frozen(outer))
            if blocks.start == 0
            else SizedModule("positions", {}, positions),
            *map(block, blocks),
            *(end if blocks.stop == shape.layers else []),
        ),
        batch=make_batch,
        loss=loss,
        samples=tokens,
        flops=flops.per_token(shape, length, lora, blocks),
        tied={"head.weight": "embedding.weight"} if shape.tied else {},
        tensor=tensor_parallel.exchange(tensor, shape.layers, tokens, shape.width, len(recomputed)),
        period=recompute_every if recompute != "none" else 1,
        flowing=tokens * shape.width,
    )


def _block(tape: Tape, x: SizedTensor, p: dict, heads: Heads, tensor: int, shape: GPTShape) -> SizedTensor:
    """models.py's Block, Attention and FeedForward, and what other models do in their places."""

    def shared(layer, x, name):
        """Of a norm's result each rank has some tokens, the layer needs them all, and its results are added up."""
        x = tensor_parallel.gather(tape, _norm(tape, x, p, f"{name}_norm"), tensor, heads.batch)
        x = tensor_parallel.scatter(tape, layer(tape, x, p, heads, shape), tensor, heads.batch)
        return _norm(tape, x, p, f"after_{name}_norm") if shape.norms == 4 else x

    if shape.norms == 1:  # both parts take the same
        normal = _norm(tape, x, p, "attention_norm")
        both = [layer(tape, normal, p, heads, shape) for layer in (_attention, _feed_forward)]
        return tape.add(x, tape.add(*both, "both parts"), "block's result")
    x = tape.add(x, shared(_attention, x, "attention"), "after attention")
    return tape.add(x, shared(_feed_forward, x, "feed_forward"), "block's result")


def _norm(tape, x, p, name):
    weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias")
    return tape.layer_norm(x, weight, bias) if bias else tape.rms_norm(x, weight)


def _attention(tape, x, p, heads, shape):
    projected = (_projection(tape, x, p, name) for name in ("query", "key", "value"))
    query, key, value = (tape.split_heads(projection, heads) for projection in projected)
    if shape.normed_heads:
        query, key = tape.rms_norm(query, p["query_norm.weight"]), tape.rms_norm(key, p["key_norm.weight"])
    if shape.positions:
        mixed = tape.attention(query, key, value, heads)
    else:
        rotated_query, rotated_key = tape.rotate(query, "query"), tape.rotate(key, "key")
        del query, key
        mixed = tape.attention(rotated_query, rotated_key, value, heads)
    return tape.linear(tape.join_heads(mixed, heads), p["output.weight"], p.get("output.bias"))


def _projection(tape, x, p, name):
    out = tape.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))
    if f"{name}.down" not in p:
        return out
    return tape.add(out, tape.linear(tape.linear(x, p[f"{name}.down"]), p[f"{name}.up"]), f"{name}, adapted")


def _feed_forward(tape, x, p, _, shape):
    def product(x, name):
        return tape.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    if shape.gated:
        return product(tape.multiply(tape.silu(product(x, "gate")), product(x, "up")), "down")
    return product(tape.silu(product(x, "up"), "gelu"), "down")
