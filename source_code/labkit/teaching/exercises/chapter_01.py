"""Exercises of chapter 01: a training loop for several ranks, memory per rank under DDP, averaging gradients."""

import torch
import torch.nn.functional as F
from planner import predict
from torch import nn

from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered

GIB, MIB = 2**30, 2**20
BILLION = 1.3e9

BATCH = 32
P = 4 * predict.numel(predict.SHAPES)  # bytes of all parameters
_HEAD = 4 * predict.numel(["fc1", "fc2"])  # bytes of the gradients of fc1 and fc2
_WHERE, _DDP = predict.peak("ddp", batch=BATCH)
_RELU = predict.total(_DDP) - _HEAD
# Backward of fc1: the ReLUs' outputs, max-pooling's indices, dropout's mask and fc1's input are still alive;
# fc1's gradients and those of its input and output are allocated.
_FC1 = (
    predict.total(predict.persistent("ddp", "unit", 1))
    + _DDP["activations"]
    + BATCH * predict.POOLED * (8 + 4 + 4)
    + 4 * predict.numel(["fc1"])
    + 4 * BATCH * (predict.POOLED + predict.HIDDEN)
)

WORLD, ALL, EACH, LR, EPOCHS = 2, 24, 4, 0.1, 2  # ranks; images in total, and in a rank's batch


class Noted(torch.utils.data.Dataset):
    """Hold a few random images and labels, the same on every rank; ``taken`` lists the indices that were read, in order."""

    def __init__(self):
        generator = torch.Generator().manual_seed(2)
        self.images = torch.randn(ALL, 6, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(3, (ALL,), generator=generator)
        self.taken = []

    def __len__(self):
        return ALL

    def __getitem__(self, number):
        self.taken.append(int(number))
        return self.images[number], self.labels[number]


def _model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.LogSoftmax(1)).double()


def _flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class _DeviceSpy:
    """Wrap a rank and record whether ``device`` was read: on the CPU code works without it, on a GPU it does not."""

    def __init__(self, me):
        self._me, self.device_read = me, False

    def __getattr__(self, name):
        return getattr(self._me, name)

    @property
    def device(self):
        self.device_read = True
        return self._me.device


def _converted(me, train):
    """Train with the learner's function on this rank.

    Returns:
        (indices of the images read, number of losses logged, names saved, final weights, whether the device was read).
    """
    me, model, data, logged, saved = _DeviceSpy(me), _model(), Noted(), [], []
    train(me, model, data, EACH, LR, EPOCHS, logged.append, lambda state: saved.append(list(state)))
    return data.taken, len(logged), saved, _flat(model), me.device_read


def _trained(order, batch, lr=LR):
    """Return the weights after one process trained on the images in this order."""
    model, data = _model(), Noted()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for numbers in torch.tensor(order).split(batch):
        optimizer.zero_grad()
        F.nll_loss(model(data.images[numbers]), data.labels[numbers]).backward()
        optimizer.step()
    return _flat(model)


def _judge_conversion(train) -> str:
    taken, logged, saved, weights, asked = zip(*on_ranks(_converted, train, ranks=WORLD), strict=True)
    whole = all(len(mine) == EPOCHS * ALL for mine in taken)
    alone = all(torch.allclose(w, _trained(mine, EACH)) for w, mine in zip(weights, taken, strict=True) if mine)
    if not any(taken):
        return "not answered yet"
    device_unused = (
        ""
        if all(asked)
        else ("not quite: me.device is never used: on GPUs, the model and each batch have to be moved there")
    )
    return _dealt(taken, whole) or _averaged(taken, weights, alone) or _once(logged, saved) or device_unused or "right"


def _dealt(taken, whole) -> str:
    """Describe the first error in how images are distributed over ranks and epochs, or return ""."""
    if whole:
        return f"not quite: each rank takes all {ALL} images in every epoch: use a DistributedSampler"
    epochs = [[mine[: len(mine) // EPOCHS], mine[len(mine) // EPOCHS :]] for mine in taken]
    for epoch in range(EPOCHS):
        dealt = [number for mine in epochs for number in mine[epoch]]
        if sorted(dealt) != list(range(ALL)):
            odd = next((n for n in range(ALL) if dealt.count(n) != 1), None)
            return f"not quite: in epoch {epoch} image {odd} is taken {dealt.count(odd)} times, summed over ranks"
    if any(first == second for first, second in epochs):
        return "not quite: epoch 1 has the order of epoch 0: the sampler reshuffles only after set_epoch(epoch)"
    return ""


def _averaged(taken, weights, alone) -> str:
    """Describe what is wrong with the ranks' final weights, or return ""."""
    if not torch.equal(weights[0], weights[1]):
        if alone:
            return (
                "not quite: the ranks have diverged: each trained alone, on its own images. Is the model "
                "wrapped in DistributedDataParallel, and do you call the wrapper to compute the loss?"
            )
        return "not quite: the ranks end with different weights: what does one of them do that the other does not do?"
    batches = zip(*(torch.tensor(mine).split(EACH) for mine in taken), strict=True)
    order = torch.cat(
        [torch.cat(batch) for batch in batches]
    ).tolist()  # one process takes all ranks' batches at each step
    if torch.allclose(weights[0], _trained(order, WORLD * EACH)):
        return ""
    for factor, words in ((WORLD, "long"), (1 / WORLD, "short")):
        if torch.allclose(weights[0], _trained(order, WORLD * EACH, LR * factor)):
            return (
                f"not quite: the ranks agree, but their steps are {WORLD} times too {words}: DDP has taken the mean "
                "over the ranks already, so do not change the loss or the learning rate"
            )
    return (
        f"not quite: the ranks agree, but not with one process that takes their {WORLD} × {EACH} images at each step: "
        "did you change batch_size, loss or optimizer?"
    )


def _once(logged, saved) -> str:
    """Describe what is wrong with logging and saving, or return ""."""
    steps = EPOCHS * ALL // (WORLD * EACH)
    if any(saved[1:]):
        return "not quite: rank 1 saves as well: on a shared disk, all ranks would write the same file at once"
    if not saved[0]:
        return "not quite: no rank saves: rank 0 has to"
    if any(name.startswith("module.") for name in saved[0][-1]):
        return f"not quite: the saved state has the key {saved[0][-1][0]!r}: save the module inside the wrapper, model.module"
    if any(logged[1:]):
        return "not quite: rank 1 logs as well: each line would appear once per rank"
    if logged[0] != steps:
        return f"not quite: rank 0 has logged {logged[0]} losses in {steps} steps"
    return ""


def _judge_average(answer) -> str:
    counts = [3, 3, 1]
    generator = torch.Generator().manual_seed(0)
    per_image = torch.randn(sum(counts), 5, generator=generator, dtype=torch.float64)  # each image's own gradient
    slices = per_image.split(counts)
    result = answer([part.mean(0) for part in slices], list(counts))
    if unanswered(result):
        return "not answered yet"
    if not torch.is_tensor(result) or result.shape != per_image[0].shape:
        return (
            f"not quite: the result must be one tensor of shape {tuple(per_image[0].shape)}, like each rank's gradient"
        )
    result, whole = result.double(), per_image.mean(0)
    wrong = {
        "each rank counts the same, so the one image of rank 2 weighs as much as three of rank 0": torch.stack(
            [part.mean(0) for part in slices]
        ).mean(0),
        "this sums over the ranks, without any division": sum(part.mean(0) for part in slices),
        "this is the gradient of the summed loss: divide by the number of all images": per_image.sum(0),
        "this is the gradient of the summed loss over the number of ranks: divide by the images": per_image.sum(0) / 3,
        "this is the gradient of rank 0 alone": slices[0].mean(0),
    }
    if torch.allclose(result, whole, rtol=1e-6, atol=0):
        if not torch.allclose(
            answer([torch.ones(2), torch.zeros(2)], [1, 3]).double(), torch.full((2,), 0.25).double()
        ):
            return "not quite: right for 3, 3 and 1 images, but not for 1 and 3 on two ranks"
        return "right"
    for slip, number in wrong.items():
        if torch.allclose(result, number, rtol=1e-6, atol=0):
            return f"not quite: {slip}"
    return f"not quite: the first element is {result[0]:.4f}, one process with all 7 images gets {whole[0]:.4f}"


EXERCISES = {
    "01.0": Do(
        title="a training loop for several ranks",
        level=2,
        minutes=8,
        judge=_judge_conversion,
        hint="Five changes: move model, images and labels to me.device; wrap the model; give the loader\n"
        "a sampler instead of shuffle=True; call sampler.set_epoch(epoch) in each epoch; and put `if me.rank == 0:`\n"
        "before log and save. The wrapper has the model in .module.",
        solution="""
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

def train_ddp(me, model, data, batch_size, lr, epochs, log, save):
    model = DistributedDataParallel(model.to(me.device))  # averages the gradients during backward
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    sampler = DistributedSampler(data)  # gives each rank its share of a shuffled epoch …
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # … and reshuffles, if it knows the epoch
        for images, labels in loader:
            loss = F.nll_loss(model(images.to(me.device)), labels.to(me.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if me.rank == 0:
                log(loss.item())
    if me.rank == 0:  # all ranks have the same weights: one copy is enough
        save(model.module.state_dict())
""",
    ),
    "01.1": Predict(
        title="a rank of DDP with Adam",
        level=1,
        minutes=3,
        answer=20 * BILLION / GIB,
        unit="GiB",
        slips={
            "4 bytes per parameter are missing: the buckets, the gradients themselves, or one of Adam's moments": 16
            * BILLION
            / GIB,
            "8 bytes per parameter are missing: Adam's two moments, or the gradients and their buckets": 12
            * BILLION
            / GIB,
            "DDP divides no memory by the number of ranks": 20 * BILLION / 8 / GIB,
            "that is GB, of 1000³ bytes; a GiB has 1024³": 20 * BILLION / 1e9,
            "those are the parameters alone": 4 * BILLION / GIB,
        },
        hint="List the components: parameters, gradients, buckets, and Adam's two moments. How many bytes per parameter "
        "does each take? Does any of them depend on the number of ranks?",
        solution=f"""
# Bytes per parameter: 4 for the parameter, 4 for its gradient, 4 in a bucket, and 2 × 4 for Adam's moments.
# The number of ranks does not appear: DDP divides the work, not the memory.
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
            "the peak has moved: you took the backward of the ReLU, but the backward of fc1 is higher now": _RELU / MIB,
            "that subtracts all 4P from the old peak; but only fc1's and fc2's gradients existed twice there, "
            "and the peak has moved": (predict.total(_DDP) - P) / MIB,
            "that is the peak without the argument": predict.total(_DDP) / MIB,
            "max-pooling's indices are missing, 8 bytes for each of its output elements": (
                _FC1 - 8 * BATCH * predict.POOLED
            )
            / MIB,
            "fc1's new gradient is missing: it exists outside the bucket until it is copied in": (
                _FC1 - 4 * predict.numel(["fc1"])
            )
            / MIB,
        },
        hint="There are three candidates. Backward of the ReLU: the old sum without the gradients' second copies. "
        "Optimizer: the same. Backward of fc1: parameters, optimizer state and the bucket; the ReLUs' outputs; for each "
        "of the 9,216 elements per image after max-pooling, its index (8 bytes), the dropout mask and fc1's input (4 "
        "bytes each); and, as temporaries, fc1's new gradients and those of its input and of its 128 outputs.",
        solution=f"""
from planner import predict

batch, P = {BATCH}, 4 * predict.numel(predict.SHAPES)  # P: bytes of all parameters
terms = predict.peak("ddp", batch=batch)[1]
relu = sum(terms.values()) - terms["gradients"]  # the old peak: fc1's and fc2's gradients are in the bucket now
# Backward of fc1, slightly earlier: conv2's large gradients do not exist yet, but fc1's exists twice.
persistent = sum(predict.persistent("ddp", "unit", 1).values())  # the buckets count once: they are the gradients now
saved = terms["activations"] + batch * predict.POOLED * (8 + 4 + 4)  # plus pooling's indices, the mask, fc1's input
fresh = 4 * predict.numel(["fc1"]) + 4 * batch * (predict.POOLED + predict.HIDDEN)
answer = max(relu, persistent + saved + fresh) / 2**20
""",
    ),
    "01.3": Do(
        title="averaging uneven slices",
        level=2,
        minutes=10,
        judge=_judge_average,
        hint="A rank can turn the mean over its images back into a sum: multiply by the number of images. "
        "The ranks' sums can be added.",
        solution="""
def average(gradients, counts):
    # Turn means into sums, add these, and divide once by the total number of images. With real DDP: multiply each
    # rank's loss by its images × ranks / all images, and let DDP average as usual.
    return sum(gradient * count for gradient, count in zip(gradients, counts)) / sum(counts)
""",
    ),
}
