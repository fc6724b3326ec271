"""Run one of 17 faults that are common on clusters. Notebook 16 runs most of them as exercises in diagnosis.

  python faults.py --fault 1 --ranks 4                    locally
  srun -p gpu -N 1 --ntasks-per-node=4 --gres=gpu:4 python faults.py --fault 1

Every rank writes its flight record to --flight, for ``diagnose_hang.py``. You may also diagnose a fault by reading its
function, but in a larger code base you would first have to know where to look.
"""

import dataclasses
import os
import queue
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from labkit.measuring import flight_recorder, memory_budget, rank_checks, records
from labkit.running import options, ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


@dataclass(frozen=True)
class Config(options.Start):
    fault: int = options.option(1, "which one, 1 to 17", least=1, at_most=17)
    flight: str = options.option("flight", "folder for the ranks' flight records")
    timeout: float = options.option(8.0, "seconds that a collective may take (a cluster gives minutes)", above=0)
    record: str | None = options.option(None, "write the result to this JSON file")


def network() -> nn.Sequential:
    """Return three blocks and a head, 3,432 parameters: (batch, 32) in, logits of 8 classes out."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)), nn.Linear(32, 8))


def batch(me, step: int = 0, size: int = 16):
    """Return this rank's (inputs, classes) of a step: (size, 32), and the argmax of each row's first 8 elements, (size,)."""
    draw = torch.Generator().manual_seed(1000 * step + me.rank)
    inputs = torch.randn(size, 32, generator=draw, device="cpu").to(me.device)
    return inputs, inputs[:, :8].argmax(1)


def shard(me, model) -> nn.Module:
    """Apply FSDP2, with each block as a unit."""
    mesh = init_device_mesh(me.device.type, (me.world_size,))
    for block in model[:3]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_step(model, optimizer, inputs, classes) -> torch.Tensor:
    loss = F.cross_entropy(model(inputs), classes)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def fault_1(me, config, result):
    model = DistributedDataParallel(network().to(me.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        loss = train_step(model, optimizer, *batch(me, step))
        if step == 5 and me.rank == 0:
            print(f"accuracy {accuracy(me, model.module):.0%}", flush=True)
        dist.all_reduce(loss)
        me.say(f"step {step}: loss {loss.item() / me.world_size:.3f}")
    dist.barrier()  # before the checkpoint


def accuracy(me, model) -> float:
    """Return the accuracy on all ranks' validation batches together."""
    inputs, classes = batch(me, step=99)
    right = (model(inputs).argmax(1) == classes).float().mean()
    dist.all_reduce(right)
    return right.item() / me.world_size


def fault_2(me, config, result):
    model = shard(me, network().to(me.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(100):
        loss = train_step(model, optimizer, *batch(me, step))
        me.say(f"step {step}: loss {loss.item():.3f}")
        if step == 3:
            memory_of_the_node_is_full(me)


def memory_of_the_node_is_full(me):
    """Simulate Linux's out-of-memory killer, which selects a process."""
    if me.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def fault_3(me, config, result):
    model = shard(me, network().to(me.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with memory_budget.Budget(model, optimizer, me.device, 2**20) as budget:
        try:
            for step in range(3):
                train_step(model, optimizer, *batch(me, step, size=256))
            me.say("trained; now the validation")
            result["trained"] = len(budget.timeline())  # the snapshots of training
            losses = []
            for step in range(90, 99):
                inputs, classes = batch(me, step, size=256)
                losses.append(F.cross_entropy(model(inputs), classes))
            result["validation"] = torch.stack(losses).mean().item()
        finally:
            result["timeline"] = budget.timeline()
            keep(me, config, result)
            dist.barrier()  # the first rank to fail ends the others: wait until the record is written


def fault_4(me, config, result):
    model = network().to(me.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = shard(me, model)
    result["losses"] = [train_step(model, optimizer, *batch(me)).item() for _ in range(8)]
    me.say("losses of one batch, repeated:", *(f"{loss:.4f}" for loss in result["losses"]))


def fault_5(me, config, result):
    model = network().to(me.device)
    mesh = init_device_mesh(me.device.type, (me.world_size,))
    if memory_is_short(me):
        for block in model[:3]:
            fully_shard(block, mesh=mesh)
    model = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        me.say(f"step {step}: loss {train_step(model, optimizer, *batch(me, step)).item():.3f}")


def memory_is_short(me) -> bool:
    """Simulate a check of the GPU's free memory: rank 1's GPU is shared with another process."""
    return me.rank == 1


def fault_6(me, config, result):
    inputs, classes = batch(ranks.Rank(0, 0, 1, "", me.device, ""), size=256)  # a data set, the same on all ranks
    model = shard(me, network().to(me.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = DistributedSampler(range(256), me.world_size, me.rank, shuffle=True)
    result |= {"losses": [], "rows": []}
    for _ in range(6):
        for rows in torch.tensor(list(sampler)).split(8):
            result["losses"].append(train_step(model, optimizer, inputs[rows], classes[rows]).item())
            result["rows"].append(rows.tolist())
    me.say(f"6 epochs; mean loss of the last one {sum(result['losses'][-8:]) / 8:.3f}")


def fault_7(me, config, result):
    with torch.device("meta"):
        model = network()
    model = shard(me, model).to_empty(device=me.device)
    leave_an_earlier_tensors_numbers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result["losses"] = [train_step(model, optimizer, *batch(me)).item() for _ in range(4)]
    me.say("losses:", *(f"{loss:.3f}" for loss in result["losses"]))


def leave_an_earlier_tensors_numbers(model):
    """Simulate memory that was used before: random values, others in each run. A new process often has 0 or NaN.

    With deterministic algorithms, PyTorch fills uninitialized memory, so this does nothing.
    """
    if not torch.are_deterministic_algorithms_enabled():
        draw = torch.Generator()
        draw.seed()
        for parameter in model.parameters():
            mine = parameter.to_local().detach()
            mine.copy_(0.4 * torch.randn(mine.shape, generator=draw, device="cpu"))


def fault_8(me, config, result):
    model = shard(me, network().to(me.device))
    path = Path(config.flight) / f"checkpoint-of-rank-{me.rank}.pt"
    if path.exists():
        state = torch.load(path, map_location=me.device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.to_local().copy_(state[name])
        me.say("resumed from", path.name)
    else:
        torch.save({name: parameter.to_local() for name, parameter in model.named_parameters()}, path)
        me.say("saved", path.name)


def fault_9(me, config, result):
    environ = as_srun_sets_it(me)
    rank, world_size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
    samples = list(range(256))[rank::world_size]
    print(f"rank {rank} of {world_size}: {len(samples)} samples per epoch", flush=True)
    result["samples"] = len(samples)


def as_srun_sets_it(me) -> dict:
    """Return the environment variables of an srun task, without those of PyTorch."""
    return {"SLURM_PROCID": str(me.rank), "SLURM_NTASKS": str(me.world_size), "SLURM_LOCALID": str(me.local_rank)}


def fault_10(me, config, result):
    """Fail before the rendezvous, as the selection of a device does."""
    visible = 1  # --gpus-per-task=1: Slurm shows each task one GPU
    print(f"rank {me.rank}: local rank {me.local_rank}, torch.cuda.device_count() {visible}", flush=True)
    set_device(me.local_rank, visible)
    meet(me, config)


def set_device(index: int, visible: int):
    """Simulate torch.cuda.set_device on the CPU, for a process that sees ``visible`` GPUs."""
    if index >= visible:
        raise RuntimeError("CUDA error: invalid device ordinal")


def fault_11(me, config, result):
    model = shard(me, network().to(me.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loaded = queue.Queue(maxsize=2)
    threading.Thread(target=load, args=(me, loaded), daemon=True).start()
    for step in range(8):
        inputs, classes = next_batch(loaded)
        me.say(f"step {step}: loss {train_step(model, optimizer, inputs, classes).item():.3f}")


def load(me, loaded):
    """Load the batches in a background thread."""
    for step in range(8):
        try:
            loaded.put(decoded(me, step))
        except ValueError:
            return


def decoded(me, step):
    if (me.rank, step) == (3, 5):
        raise ValueError("a damaged file")
    return batch(me, step)


def next_batch(loaded):
    return loaded.get()


def fault_12(me, config, result):
    model = DistributedDataParallel(network().to(me.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = range(me.rank, 30, me.world_size)  # this rank's batches of thirty
    for step, number in enumerate(mine):
        me.say(f"step {step}: loss {train_step(model, optimizer, *batch(me, number)).item():.3f}")
    dist.barrier()


def fault_13(me, config, result):
    model = DistributedDataParallel(network().to(me.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    began = time.perf_counter()
    for step in range(16):
        loss = train_step(model, optimizer, *loaded_batch(me, step))
        me.say(f"step {step}: loss {loss.item():.3f}") if step % 5 == 0 else None
    me.say(f"{(time.perf_counter() - began) / 16:.2f} s per step")


def loaded_batch(me, step):
    """Simulate a node whose storage is slow."""
    if me.rank == 2:
        time.sleep(0.15)
    return batch(me, step)


def fault_14(me, config, result):
    model = shard(me, network().to(me.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(7):
        inputs, classes = batch(me, step)
        if (me.rank, step) == (1, 3):
            inputs[5, 7] = torch.inf  # simulates a sample that was decoded wrongly
        me.say(f"step {step}: loss {train_step(model, optimizer, inputs, classes).item():.3f}")


def fault_15(me, config, result):
    model = DistributedDataParallel(network().to(me.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        me.say(f"step {step}: loss {train_step(model, optimizer, *batch(me, step)).item():.3f}")
        if (me.rank, step) == (2, 3):
            flip_a_bit(model.module[1][0].weight)
    validation = batch(ranks.Rank(0, 0, 1, "", me.device, ""), step=99)  # the same on all ranks
    with torch.no_grad():
        print(
            f"rank {me.rank}: validation loss {F.cross_entropy(model.module(validation[0]), validation[1]):.4f}",
            flush=True,
        )


def flip_a_bit(weight, bit: int = 25):
    """Simulate memory that fails: flip a bit of the first element's exponent (fp32)."""
    weight.detach().view(torch.int32).view(-1)[0] ^= 1 << bit


def fault_16(me, config, result):
    model = shard(me, network().to(me.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(8):
        if (me.rank, step) == (3, 4):
            # What CUDA's runtime library says of a broken GPU
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        me.say(f"step {step}: loss {train_step(model, optimizer, *batch(me, step)).item():.3f}")


def fault_17(me, config, result):
    mesh = hybrid_mesh(me, config.timeout)
    model = network().to(me.device)
    for block in model[:3]:
        fully_shard(block, mesh=mesh)
    model = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(8):
        if (me.rank, step) == (1, 4):
            wait_for_the_file_system()
        me.say(f"step {step}: loss {train_step(model, optimizer, *batch(me, step)).item():.3f}")


def hybrid_mesh(me, seconds: float) -> DeviceMesh:
    """Return a mesh of 2 replicas, each sharded over half the ranks, whose collectives may take as long as the process group's."""
    grid, limit = torch.arange(me.world_size, device="cpu").view(2, -1), timedelta(seconds=seconds)
    names = ("replicate", "shard")
    groups = []
    for name, rows in zip(names, (grid.T.tolist(), grid.tolist()), strict=True):
        made = [dist.new_group(row, timeout=limit, group_desc=name) for row in rows]  # every rank makes every group
        groups += [group for group, row in zip(made, rows, strict=True) if me.rank in row]
    return DeviceMesh.from_group(groups, me.device.type, grid, mesh_dim_names=names)


def wait_for_the_file_system():
    """Simulate a read from a network folder that does not answer."""
    threading.Event().wait()


FAULTS = [
    fault_1, fault_2, fault_3, fault_4, fault_5, fault_6, fault_7, fault_8, fault_9, fault_10, fault_11, fault_12, fault_13,
    fault_14, fault_15, fault_16, fault_17,
]  # fmt: skip


# What mends them


def on_all_ranks(me) -> tuple[float, int]:
    """Mend faults 1 and 12: return the accuracy, reduced by every rank, and the steps of a loop of equal length."""
    model = DistributedDataParallel(network().to(me.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = range(me.rank, 30 - 30 % me.world_size, me.world_size)  # the batches that do not go round are dropped
    for number in mine:
        train_step(model, optimizer, *batch(me, number))
    return accuracy(me, model.module), len(mine)


def wrapped_alike(me) -> nn.Module:
    """Mend fault 5: memory that is short on one rank is short on all."""
    short = torch.tensor(int(memory_is_short(me)), device=me.device)
    dist.all_reduce(short, op=dist.ReduceOp.MAX)
    model, mesh = network().to(me.device), init_device_mesh(me.device.type, (me.world_size,))
    for block in model[:3] if short.item() else ():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def validated(me, context) -> tuple[list, int]:
    """Run fault 3's validation within a context; return (timeline, how many of its snapshots are of training)."""
    model = shard(me, network().to(me.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with memory_budget.Budget(model, optimizer, me.device, 2**21) as budget:
        for step in range(3):
            train_step(model, optimizer, *batch(me, step, size=256))
        trained, losses = len(budget.timeline()), []
        with context():
            for step in range(90, 99):
                inputs, classes = batch(me, step, size=256)
                losses.append(F.cross_entropy(model(inputs), classes))
        return budget.timeline(), trained


def trained(me, sharded_first: bool) -> tuple[int, list]:
    """Train as fault 4, or mend it; return (how many of the optimizer's tensors are the model's, the losses)."""
    model = network().to(me.device)
    model = shard(me, model) if sharded_first else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = model if sharded_first else shard(me, model)
    of_model = {id(parameter) for parameter in model.parameters()}
    shared = sum(id(p) in of_model for group in optimizer.param_groups for p in group["params"])
    return shared, [train_step(model, optimizer, *batch(me)).item() for _ in range(8)]


def orders(me, set_epoch: bool) -> list:
    """Return the samples of each step of fault 6, or mend it."""
    sampler = DistributedSampler(range(256), me.world_size, me.rank, shuffle=True)
    rows = []
    for epoch in range(6):
        if set_epoch:
            sampler.set_epoch(epoch)
        rows += torch.tensor(list(sampler)).split(8)
    return [some.tolist() for some in rows]


def from_empty(me, begin) -> tuple[list, list]:
    """Start as fault 7 does, where empty memory is NaN; ``begin(model, device)`` may fill it. Return (losses, shards)."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # which the switch wants on GPUs
    torch.use_deterministic_algorithms(True)
    with torch.device("meta"):
        model = network()
    model = shard(me, model).to_empty(device=me.device)
    begin(model, me.device)
    shards = [parameter.to_local().tolist() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return [train_step(model, optimizer, *batch(me)).item() for _ in range(4)], shards


def initial_weights(model, device):
    """Draw each layer whole, with one seed on all ranks; keep this rank's part, and free the rest."""
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            whole = nn.Linear(layer.in_features, layer.out_features).to(device)
            for mine, value in zip(layer.parameters(), whole.parameters(), strict=True):
                part = distribute_tensor(value.detach(), mine.device_mesh, mine.placements, src_data_rank=None)
                mine.detach().copy_(part)


def checked(me, flips: bool, spoils: bool) -> tuple:
    """Train as faults 14 and 15 do, with ``rank_checks``: return (where a NaN began, the replicas that differ)."""
    finite = rank_checks.FirstNonFinite(me.device)
    model = DistributedDataParallel(network().to(me.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        inputs, classes = batch(me, step)
        if flips and (me.rank, step) == (2, 1):
            flip_a_bit(model.module[1][0].weight)
        if step == 2:
            differing = rank_checks.differing(model)
        if spoils and (me.rank, step) == (1, 2):
            inputs[5, 7] = torch.inf
        finite.see(step, train_step(model, optimizer, inputs, classes))
    return finite.origin(), differing


def keep(me, config, result):
    if config.record and me.rank == 0:
        about = records.new(__file__, dataclasses.asdict(config), me, [me.node])
        records.write(config.record, about | {"found": result})


def meet(me, config):
    device = me.device if me.device.type == "cuda" else None
    dist.init_process_group(me.backend, timeout=timedelta(seconds=config.timeout), device_id=device)


def main(config, me):
    fault, result = FAULTS[config.fault - 1], {}
    try:
        with flight_recorder.recorder(config.flight, quiet=config.timeout / 3):
            if fault is not fault_10:
                meet(me, config)
            fault(me, config, result)
    finally:
        keep(me, config, result)


if __name__ == "__main__":
    ranks.run(main, options.parse(Config, __doc__))
