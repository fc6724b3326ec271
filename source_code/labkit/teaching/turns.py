# SPDX-License-Identifier: BSD-3-Clause
"""Evaluate steps that were timed in turns: spreads, ratios within a round, and what a traced step divides into."""

import statistics


def spread(values) -> dict:
    """Return the median, the 10th and the 90th percentile of times, as in a record."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": deciles[0], "p90": deciles[-1], "steps": len(values)}


def ratio(times: dict, of, to) -> dict:
    """Return how many times as long one step is as another: the spread of the rounds' own ratios.

    times: {name: seconds of each round}.
    """
    return spread([a / b for a, b in zip(times[of], times[to], strict=True)])


def parts_of(step: dict, exposed) -> tuple[dict, float]:
    """Divide a step into its parts with a ruler.

    Args:
        step: what ``step_lanes.lanes_of`` returns.
        exposed: the ruler, a function of (communication, compute), both lists of (begin, end), that returns seconds.

    Returns:
        ({part: its share of the step}, the share of its communication that is hidden).
    """
    wire, whole = [(begin, end) for _, begin, end in step["collectives"]], step["end"] - step["begin"]
    parts = {"operators": exposed(step["operators"], []), "exposed communication": exposed(wire, step["operators"])}
    parts["rest"] = whole - sum(parts.values())
    hidden = 1 - parts["exposed communication"] / exposed(wire, [])
    return {part: seconds / whole for part, seconds in parts.items()}, hidden


def ddp_step(me, shape, ranks: int, batch: int, group):
    """Return a step of DDP over the first ranks, as a function that returns this rank's loss; on other ranks, None.

    Args:
        me: a ``ranks.Rank``.
        shape: of the GPT.
        ranks: size of this world.
        batch: sequences per rank.
        group: the process group of these ranks.
    """
    import torch

    from labkit.training import text
    from labkit.training.models import GPT

    if me.rank >= ranks:
        return lambda: None
    data = text.load(me.device).train
    mine = text.starts(data, 128, ranks * batch, seed=1, step=0)[me.rank * batch :][:batch]
    inputs, targets = text.sequences(data, mine, 128)
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(GPT(shape).to(me.device), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)  # a gradient's scale matters to it

    def step():
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
