"""What a plan says, as pages for people. asked: the options of plan.py; found: what it has worked out, as for JSON."""

from planner.predict import Plan, total

GIB = 2**30
KERNELS = {"cuda": "a GPU's kernels", "cpu": "the CPU's kernels"}
COMPARED = """(a GPU's kernels: compared with PyTorch's own code on tensors without memory, not yet with a GPU. Not in it, since only
a GPU can show it: workspaces of cuDNN and cuBLAS, NCCL's buffers, streams, what the allocator rounds up and reserves)"""
SMALL = 1e-3  # terms below this share of the peak are explained together


def gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.2f} MiB"


def as_text(asked, found: dict) -> str:
    """A page for people."""
    where = found["where"] + (f", on rank {found['rank']}, which needs most" if found["rank"] else "")
    how = f"{asked.stages} stages ({asked.schedule})" if asked.stages > 1 else asked.strategy
    stages = [f"peaks of the stages  {', '.join(map(gib, found['stages']))}"] if asked.stages > 1 else []
    lines = [
        (
            f"{asked.model}: {found['parameters']:,} parameters, {how} on {asked.ranks} ranks, "
            f"{asked.precision}, recompute {asked.recompute}, {asked.optimizer}; {KERNELS[asked.device]}"
        ),
        "",
        *stages,
        f"peak of a rank      {gib(found['peak']):>14}   at: {where}",
        *(f"  {name:18}{gib(size):>14}" for name, size in found["by_category"].items()),
        f"kept between steps  {gib(sum(found['persistent'].values())):>14}",
        f"peak of step 1      {gib(found['first_step_peak']):>14}   before it there is no optimizer state",
        "",
        "collectives of a step           size each   a rank sends   leave a node, in all",
    ]
    for c in found["traffic"]:
        sizes = [f"{size / 1e6:,.1f} MB" for size in (c["bytes"], c["count"] * c["rank"], c["count"] * c["node"])]
        along = "   along tensor" if c["dimension"] == "tensor" else ""
        lines.append(f"  {c['count']:4} × {c['kind']:16}{sizes[0]:>17}{sizes[1]:>15}{sizes[2]:>23}{along}")
    times = found["seconds"]
    waiting = f", the pipeline's bubble {times['bubble']:.3g} s" if times["bubble"] else ""
    lines += [
        "",
        (
            f"compute {times['compute']:.3g} s at {asked.efficiency:.0%} of {asked.flops / 1e12:g} TFLOP/s, "
            f"communication {times['communication']:.3g} s{waiting}"
        ),
        f"a step takes {times['in turn']:.3g} s one after the other, {times['overlapped']:.3g} s overlapped",
        f"{found['samples_per_second']:,.0f} tokens a second at best, all ranks together",
        "",
        verdict(asked, found["room"]),
    ]
    if asked.device == "cuda":
        lines.append(COMPARED)
    return "\n".join(lines)


def verdict(asked, room: float) -> str:
    if room >= 0:
        return f"fits in {asked.gpu_memory:g} GiB, with {gib(room)} to spare"
    return f"does not fit in {asked.gpu_memory:g} GiB: {gib(-room)} too much"


def explained(plan: Plan) -> str:
    """Each term of the peak, the largest first, with its numbers; the small ones together. They add up to the peak."""
    terms = plan.explain()
    peak = sum(size for _, size, _ in terms)
    large = [term for term in terms if term[1] >= SMALL * peak]
    small = terms[len(large) :]
    width = max(len(name) for (_, name), _, _ in large)
    lines = [f"{gib(size):>12}  {category:16} {name:{width}}  {text}" for (category, name), size, text in large]
    if small:
        lines.append(f"{gib(sum(size for _, size, _ in small)):>12}  {len(small)} smaller terms")
    return "\n".join(lines)


def sweep_text(asked, rows: list[dict]) -> str:
    lines = [
        (
            f"{asked.model} on {asked.ranks} ranks, {asked.gpu_memory:g} GiB each, {asked.precision}; "
            f"predicted, at {asked.efficiency:.0%} of {asked.flops / 1e12:g} TFLOP/s"
        ),
        "",
        f"{'strategy':30}{'recompute':11}{'peak':>18}{'tokens/s':>11}",
    ]
    for row in rows:
        fits = "" if row["room"] >= 0 else "does not fit"
        numbers = f"{gib(row['peak']):>18}{row['samples_per_second']:>11,.0f}"
        lines.append(f"{row['strategy']:30}{row['recompute']:11}{numbers}   {fits}".rstrip())
    return "\n".join(lines)


def own_text(asked, plan: Plan, found: dict) -> str:
    """A page on a network of one's own: the peak simulated, the rest predicted."""
    lines = [
        (
            f"{asked.model}: {plan.blueprint.numel:,} parameters in {len(plan.units)} units, {asked.strategy} on "
            f"{asked.ranks} ranks, {asked.precision}, {asked.optimizer}; the CPU's kernels"
        ),
        "",
        f"simulated peak of a rank  {gib(found['simulated']):>14}   at: {found['simulated_at']}",
        *(f"  {name:24}{gib(size):>14}" for name, size in found["simulated_by_category"].items()),
        f"predicted, between steps  {gib(total(plan.persistent())):>14}",
        "predicted collectives of a step:",
        *(f"  {c['count']:4} × {c['kind']:16}{c['bytes'] / 1e6:>12,.1f} MB" for c in plan.traffic()),
        "",
        verdict(asked, asked.gpu_memory * GIB - found["simulated"]),
    ]
    return "\n".join(lines)
