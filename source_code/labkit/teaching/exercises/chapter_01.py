"""Chapter 01: what a rank holds under DDP, and what averaging means."""

import torch
from planner import predict

from labkit.teaching.exercises import Do, Predict, unanswered

GIB, MIB = 2**30, 2**20
BILLION = 1.3e9

BATCH = 32
P = 4 * predict.numel(predict.SHAPES)  # bytes of all parameters
_HEAD = 4 * predict.numel(["fc1", "fc2"])  # bytes of the gradients of fc1 and fc2
_WHERE, _DDP = predict.peak("ddp", batch=BATCH)
_RELU = predict.total(_DDP) - _HEAD
# Backward of fc1: still there are the ReLUs' outputs, max-pooling's indices, dropout's mask and fc1's input;
# new are fc1's gradients and those of its input and output.
_FC1 = (
    predict.total(predict.persistent("ddp", "unit", 1))
    + _DDP["activations"]
    + BATCH * predict.POOLED * (8 + 4 + 4)
    + 4 * predict.numel(["fc1"])
    + 4 * BATCH * (predict.POOLED + predict.HIDDEN)
)


def _judge_average(answer) -> str:
    counts = [3, 3, 1]
    generator = torch.Generator().manual_seed(0)
    per_image = torch.randn(sum(counts), 5, generator=generator, dtype=torch.float64)  # each image's own gradient
    slices = per_image.split(counts)
    given = answer([part.mean(0) for part in slices], list(counts))
    if unanswered(given):
        return "not answered yet"
    if not torch.is_tensor(given) or given.shape != per_image[0].shape:
        return f"not quite: one tensor of shape {tuple(per_image[0].shape)} is wanted, as each rank's gradient has"
    given, whole = given.double(), per_image.mean(0)
    wrong = {
        "each rank counts the same, so the one image of rank 2 weighs as much as three of rank 0": torch.stack(
            [part.mean(0) for part in slices]
        ).mean(0),
        "this adds the ranks up, and divides by nothing": sum(part.mean(0) for part in slices),
        "this is the gradient of the summed loss: divide by the number of all images": per_image.sum(0),
        "this is the gradient of the summed loss over the number of ranks: divide by the images": per_image.sum(0) / 3,
        "these are the numbers of rank 0 alone": slices[0].mean(0),
    }
    if torch.allclose(given, whole, rtol=1e-6, atol=0):
        if not torch.allclose(
            answer([torch.ones(2), torch.zeros(2)], [1, 3]).double(), torch.full((2,), 0.25).double()
        ):
            return "not quite: right for 3, 3 and 1 images, but not for 1 and 3 on two ranks"
        return "right"
    for slip, number in wrong.items():
        if torch.allclose(given, number, rtol=1e-6, atol=0):
            return f"not quite: {slip}"
    return f"not quite: the first number is {given[0]:.4f}, one process with all 7 images has {whole[0]:.4f}"


EXERCISES = {
    "01.1": Predict(
        title="a rank of DDP with Adam",
        level=1,
        minutes=3,
        answer=20 * BILLION / GIB,
        unit="GiB",
        slips={
            "4 bytes a parameter are missing: the buckets, the gradients' own copies, or Adam's second number": 16
            * BILLION
            / GIB,
            "8 bytes a parameter are missing: Adam's state, or the gradients with their buckets": 12 * BILLION / GIB,
            "nothing is divided by the number of ranks under DDP": 20 * BILLION / 8 / GIB,
            "that is GB, of 1000³ bytes; a GiB has 1024³": 20 * BILLION / 1e9,
            "those are the parameters alone": 4 * BILLION / GIB,
        },
        hint="List what is there: parameters, gradients, buckets, two numbers of Adam. How many bytes a parameter "
        "is each? Does any of them depend on the number of ranks?",
        solution=f"""
# A parameter costs 4 bytes as itself, 4 as a gradient, 4 in a bucket, and 2 × 4 in Adam: 20 bytes.
# The 8 ranks do not appear: DDP divides the work, not the memory.
answer = (4 + 4 + 4 + 2 * 4) * {BILLION:.1e} / 2**30
""",
    ),
    "01.2": Predict(
        title="gradients that live in their buckets",
        level=3,
        minutes=10,
        answer=max(_FC1, _RELU) / MIB,
        unit="MiB",
        tolerance=0.001,
        slips={
            "the peak has moved: you took the backward of the ReLU, but that of fc1 is higher now": _RELU / MIB,
            "that takes all 4P away from the old peak; but there only fc1's and fc2's gradients were double, "
            "and the peak has moved": (predict.total(_DDP) - P) / MIB,
            "that is the peak without the argument": predict.total(_DDP) / MIB,
            "max-pooling's indices are missing, 8 bytes for each of the numbers it puts out": (
                _FC1 - 8 * BATCH * predict.POOLED
            )
            / MIB,
            "fc1's fresh gradient is missing: it exists outside the bucket until it is copied in": (
                _FC1 - 4 * predict.numel(["fc1"])
            )
            / MIB,
        },
        hint="Three candidates. Backward of the ReLU: the old sum without the gradients' second copies. Optimizer: "
        "the same. Backward of fc1: parameters, optimizer state and the bucket; the ReLUs' outputs; of the 9,216 "
        "numbers an image after max-pooling the indices (8 bytes each), the dropout mask and fc1's input (4 bytes "
        "each); and as temporaries fc1's fresh gradients and those of its input and of its 128 outputs.",
        solution=f"""
from planner import predict

batch, P = {BATCH}, 4 * predict.numel(predict.SHAPES)  # P: bytes of all parameters
terms = predict.peak("ddp", batch=batch)[1]
relu = sum(terms.values()) - terms["gradients"]  # the old peak: fc1's and fc2's gradients are in the bucket
# Backward of fc1, a moment earlier: conv2's big gradients do not exist yet, but fc1's exists twice.
held = sum(predict.persistent("ddp", "unit", 1).values())  # the bucket counts once: it is the gradients now
kept = terms["activations"] + batch * predict.POOLED * (8 + 4 + 4)  # and pooling's indices, the mask, fc1's input
fresh = 4 * predict.numel(["fc1"]) + 4 * batch * (predict.POOLED + predict.HIDDEN)
answer = max(relu, held + kept + fresh) / 2**20
""",
    ),
    "01.3": Do(
        title="averaging uneven slices",
        level=2,
        minutes=10,
        judge=_judge_average,
        hint="From a mean over its own images a rank can go back to the sum: multiply by the number of images. "
        "Sums of ranks may be added up.",
        solution="""
def average(gradients, counts):
    # Back to sums, which may be added; then one division by the number of all images. With real DDP: multiply each
    # rank's loss by its images × ranks / all images, and let DDP average as always.
    return sum(gradient * count for gradient, count in zip(gradients, counts)) / sum(counts)
""",
    ),
}
