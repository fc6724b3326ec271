# SPDX-License-Identifier: BSD-3-Clause
"""Kill one of two replicas under torchft, and let its successor copy the state from the other's memory; no file is written.

  pip install torchft
  python -m proofs.peer_recovery            a few lines and a record

Two replicas of one process train the same small network on gloo, each on its own samples. One kills itself (SIGKILL) at a
step and is started again, with other initial weights. torchft is not among the course's requirements.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from labkit import UserError
from labkit.measuring import records
from labkit.running import ranks
from labkit.running.options import Options, option, parse
from torch import nn

STEPS, KILLED_AT = 120, 8


def replica(number: int, seed: int, killed_at: int):
    """Train until the last step, and print a line of JSON after each step."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(seed)
    module = nn.Linear(4, 4)
    plain = torch.optim.AdamW(module.parameters(), lr=0.01)

    def load(state):
        module.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        replica_id=f"replica-{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
    )
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, plain)
    while manager.current_step() < STEPS:
        begin = time.perf_counter()
        optimizer.zero_grad()
        samples = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * manager.current_step() + number))
        model(samples).square().mean().backward()
        if killed_at and manager.current_step() == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        row = {"step": manager.current_step(), "replicas": manager.num_participants()}
        row |= {"seconds": time.perf_counter() - begin, "weights": module.weight.detach().flatten().tolist()}
        print(json.dumps(row), flush=True)
        time.sleep(0.05)  # so that the training lasts longer than a new process needs to start
    manager.shutdown(wait=False)


def run() -> dict:
    """Run two replicas, the second of which is killed and started again: return {who: [a row per step]}."""
    try:
        from torchft.coordination import LighthouseServer
    except ImportError:
        raise UserError("torchft is not installed: pip install torchft") from None
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=200, quorum_tick_ms=50)
    env = os.environ | {"TORCHFT_LIGHTHOUSE": lighthouse.address()}

    def start(number, seed, killed_at):
        words = [
            sys.executable,
            "-m",
            "proofs.peer_recovery",
            f"--replica={number}",
            f"--seed={seed}",
            f"--killed-at={killed_at}",
        ]
        return subprocess.Popen(words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    survivor, killed = start(0, 1, 0), start(1, 2, KILLED_AT)
    printed = {"killed": killed.communicate(timeout=120)[0]}
    successor = start(1, 3, 0)
    printed["successor"] = successor.communicate(timeout=120)[0]
    printed["survivor"] = survivor.communicate(timeout=120)[0]
    lighthouse.shutdown()
    return {
        who: [json.loads(line) for line in text.splitlines() if line.startswith("{")] for who, text in printed.items()
    }


@dataclass(frozen=True)
class Config(Options):
    """Where the record goes; the other options are for the replicas. The command line is made from these fields."""

    record: str | None = option(None, "where the record goes (default: results/runs/)")
    replica: int = option(-1, "train as this replica")
    seed: int = option(1, "of a replica's initial weights")
    killed_at: int = option(0, "step in which a replica kills itself; 0: never")


def main():
    options = parse(Config, __doc__)
    if options.replica >= 0:
        return replica(options.replica, options.seed, options.killed_at)
    try:
        path = records.new_path("peer-recovery", options.record)
        lives = run()
    except UserError as error:
        ranks.exit_with_error(str(error))
    by_step = {row["step"]: row for row in lives["survivor"]}
    apart = [row["step"] for row in lives["successor"] if row["weights"] != by_step[row["step"]]["weights"]]
    first = lives["successor"][0]["step"]
    longest = max(row["seconds"] for row in lives["survivor"][1:])
    print(f"killed after step {lives['killed'][-1]['step']}; the survivor's longest step took {longest:.1f} s")
    print(
        f"its successor's first step was {first} of {STEPS}; steps with other weights than the survivor's: {len(apart)}"
    )
    rows = [{"who": who, **row} for who, each in lives.items() for row in each]
    records.write_rows(path, rows, steps=STEPS, killed_at=KILLED_AT)
    print(f"record: {path}")
    sys.exit(bool(apart) or first <= KILLED_AT + 1)


if __name__ == "__main__":
    main()
