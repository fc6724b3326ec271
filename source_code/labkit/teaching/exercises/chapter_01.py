# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 01: a training loop for several ranks, DDP's buckets by hand, averaging uneven slices."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.measuring.differences import largest_difference
from labkit.teaching.exercises import Do, on_ranks, unanswered

WORLD, ALL, EACH, LR, EPOCHS = 2, 24, 4, 0.1, 2  # ranks; images in total, and in a rank's batch
HOOK_RANKS, PASSES, LIMIT = 3, 2, 60  # of 01.1: ranks, backward passes, elements that fill a bucket


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


class _Watch:
    """Record when all-reduces start and are waited for, relative to one backward pass of a model."""

    def __init__(self, model):
        self.begin()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._count)

    def begin(self):
        self.ready, self.running = 0, False  # gradients complete in this pass; whether backward is running
        self.starts = []  # of each all-reduce: (gradients complete, whether backward is running, async_op)
        self.waits = []  # of each wait(): whether backward is running

    def _count(self, parameter):
        self.ready += 1

    def backward(self, loss):
        self.running = True
        loss.backward()
        self.running = False

    def watched(self, all_reduce):
        """Return an ``all_reduce`` that is recorded."""

        def recorded(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
            self.starts.append((self.ready, self.running, bool(async_op)))
            work = all_reduce(tensor, op, group, async_op)
            return work and _WatchedWork(work, self)

        return recorded


class _WatchedWork:
    """Wrap what an asynchronous all-reduce returns, and record calls of ``wait``."""

    def __init__(self, work, watch):
        self._work, self._watch = work, watch

    def __getattr__(self, name):
        return getattr(self._work, name)

    def wait(self, *args):
        self._watch.waits.append(self._watch.running)
        return self._work.wait(*args)


def _deep_model():
    torch.manual_seed(3)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def _gradients(model, inputs, backward=torch.Tensor.backward, finish=lambda: None) -> dict[str, torch.Tensor]:
    """Return {name: gradient} of one pass."""
    model.zero_grad()
    backward(model(inputs).square().mean())
    finish()
    return {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}


def _hooked(me, average_during_backward):
    """Run backward passes with the learner's function on this rank, and with DDP; stop at a pass that raises.

    Returns:
        None if the function returns None; else (whether the learner has registered hooks, [(starts, waits, the
        learner's gradients, DDP's, this rank's own) of each pass], the error of a later pass than the first, or "").
    """
    generator = torch.Generator().manual_seed(me.rank)
    inputs = torch.randn(PASSES, EACH, 6, generator=generator, dtype=torch.float64)
    ddp, alone, model = DistributedDataParallel(_deep_model()), _deep_model(), _deep_model()
    expected = [(_gradients(ddp, x), _gradients(alone, x)) for x in inputs]
    watch, passes = _Watch(model), []
    finish = average_during_backward(model, LIMIT)
    if unanswered(finish):
        return None
    hooks = any(len(p._post_accumulate_grad_hooks) > 1 for p in model.parameters())  # one is the watch's
    all_reduce, dist.all_reduce = dist.all_reduce, watch.watched(dist.all_reduce)
    try:
        for x, others in zip(inputs, expected, strict=True):
            watch.begin()
            mine = _gradients(model, x, watch.backward, finish)
            passes.append((watch.starts, watch.waits, mine, *others))
    except Exception as error:
        if not passes:
            raise
        return hooks, passes, f"{type(error).__name__}: {error}"
    finally:
        dist.all_reduce = all_reduce
    return hooks, passes, ""


def _judge_buckets(average_during_backward) -> str:
    results = on_ranks(_hooked, average_during_backward, ranks=HOOK_RANKS)
    if None in results:
        return "not answered yet"
    hooks, ((starts, waits, mine, *_), *_), error = results[0]
    if not hooks and not starts:
        return "not answered yet: collect is not registered on any parameter"
    if not starts:
        return "not quite: no all-reduce starts: call dist.all_reduce when the bucket is full"
    wrong = _waited(starts, waits) or _on_any_rank(results, 0) or _overlaps(starts, len(mine))
    if wrong:
        return f"not quite: {wrong}"
    if error:
        return f"not quite: right in the first pass, but the second raises {error}: does finish() empty both lists?"
    starts, waits, *_ = results[0][1][1]
    wrong = _waited(starts, waits) or _on_any_rank(results, 1)
    return f"not quite: right in the first pass, but in the second {wrong}" if wrong else "right"


def _on_any_rank(results, number: int) -> str:
    return next(filter(None, (_averages(*passes[number][2:]) for _, passes, _ in results)), "")


def _waited(starts, waits) -> str:
    """Describe what is wrong with how a pass's all-reduces are waited for, or return ""."""
    if not all(asynchronous for _, _, asynchronous in starts):
        return "an all-reduce without async_op=True returns only when it is done, and backward stands still"
    if any(waits):
        return "a hook calls wait(), and backward stands still until it returns: leave that to finish()"
    if len(waits) != len(starts):
        return f"{len(starts)} all-reduces start, and wait() is called {len(waits)} times"
    return ""


def _averages(mine, ddp, own) -> str:
    """Describe the first gradient of a pass that is not DDP's, or return ""."""
    wrong = next((name for name in mine if not _close(mine[name], ddp[name])), None)
    if wrong is None:
        return ""
    if all(torch.equal(mine[name], own[name]) for name in mine):
        return "all gradients are still the rank's own after finish(): copy the averages into parameter.grad"
    factor = sum(g.norm() for g in mine.values()) / sum(g.norm() for g in ddp.values())
    if all(_close(mine[name], factor * ddp[name]) for name in mine):
        return f"the gradients are {factor:.3g} times DDP's: divide by the number of ranks, once"
    if torch.equal(mine[wrong], own[wrong]):
        return (
            f"the gradient of {wrong} is still the rank's own: does finish() start the last bucket, and copy every "
            "average back?"
        )
    off = largest_difference(mine[wrong], ddp[wrong])
    return f"the gradient of {wrong} differs from DDP's by {off:.2g}: is each part copied to its parameter?"


def _close(gradient, reference) -> bool:
    return torch.allclose(gradient, reference, rtol=1e-9, atol=1e-12)


def _overlaps(starts, parameters: int) -> str:
    """Describe what is wrong with when a pass's all-reduces start, or return ""."""
    ready, running, _ = starts[0]
    if len(starts) == 1:
        return "one all-reduce for all gradients: start one as soon as the bucket has limit elements"
    if len(starts) >= parameters:
        return "one all-reduce per gradient: collect until the bucket has limit elements"
    if not running or ready == parameters:
        return "the first all-reduce starts when backward has ended: let collect start it"
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
    "01.1": Do(
        title="buckets and overlap",
        level=3,
        minutes=20,
        judge=_judge_buckets,
        hint="Both collect and finish start an all-reduce, so make that a function of its own, start(): torch.cat the\n"
        "flattened gradients, call dist.all_reduce(flat, async_op=True), and append (work, flat, the parameters) to\n"
        "started. The bucket's list must be copied before it is cleared. In finish, flat.split([p.numel() for p in\n"
        "parameters]) gives the parts in the order in which they were concatenated.",
        solution="""
import torch
import torch.distributed as dist

def average_during_backward(model, limit):
    bucket, started = [], []  # parameters whose gradients wait; (work, flat tensor, its parameters)

    def start():
        flat = torch.cat([p.grad.flatten() for p in bucket])
        work = dist.all_reduce(flat, async_op=True)  # returns at once, and backward goes on
        started.append((work, flat, bucket.copy()))
        bucket.clear()

    def collect(parameter):
        bucket.append(parameter)
        if sum(p.numel() for p in bucket) >= limit:
            start()

    def finish():
        if bucket:  # the last one, which is not full
            start()
        for work, flat, parameters in started:
            work.wait()
            flat /= dist.get_world_size()
            for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
                p.grad.copy_(part.view_as(p))
        started.clear()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(collect)
    return finish
""",
    ),
    "01.2": Do(
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
