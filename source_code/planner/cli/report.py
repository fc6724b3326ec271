# SPDX-License-Identifier: BSD-3-Clause
"""Print plans as text. asked: the options of plan.py; found: what planner/cli/commands.py has computed, as for JSON."""

from planner.cli.commands import NOT_PLANNED
from planner.gpus import COMMUNICATOR, GIB, REPORTED
from planner.predict import Plan, by_category, total

KERNELS = {True: "a GPU's kernels", False: "the CPU's kernels"}  # by whether it is on a GPU
# Printed first: whoever plans a run with one of these must know that it is not in the figures.
NOT_MODELLED = "not modelled: fp8"
COMPARED = """(a GPU's kernels: compared with PyTorch's own code on tensors without memory, not yet with a GPU. What only a GPU can show
is in the answer as a factor: workspaces of cuDNN and cuBLAS, streams, what the allocator rounds up and reserves)"""
SIMULATED = """(simulated with the operators that PyTorch selects on a GPU, and without memory; not yet compared with a GPU. What only a
GPU can show is in the answer as a factor: workspaces of cuDNN and cuBLAS, streams, what the allocator rounds up and reserves)"""
ALONG = ("tensor", "context", "expert", "expert_shard")  # the dimensions of a mesh that a collective is printed with
SMALL = 1e-3  # terms below this share of the peak are explained together


def not_modelled(asked) -> str:
    """Return the line that names what is in none of the figures."""
    return NOT_MODELLED + (", this model's dropout" if dropout_note(asked) else "")


def dropout_note(asked) -> str:
    """Return what must be added to "fits", if the model's dropout is not counted; a simulated step counts it."""
    counted = asked.by_library or not asked.shape or not asked.shape.unplanned_dropout(asked.on_gpu)
    return "" if counted else " without its dropout"


def gib(size: float) -> str:
    """Return bytes as text, in GiB or MiB."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.2f} MiB"


def title(asked) -> str:
    """Return one line: the model and how it is trained."""
    how = f"{asked.stages} stages ({asked.schedule})" if asked.stages > 1 else asked.strategy
    mesh = f" (--mesh {asked.mesh})" if asked.mesh and asked.stages == 1 else ""
    ranks, batch, seq = (
        "?" if asked.find == name else f"{getattr(asked, name.replace('-', '_')):,}"
        for name in ("ranks", "batch-size", "seq-len")
    )
    besides = [
        f", --{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in asked.besides.items()
    ]
    return (
        f"{asked.named}, {how} on {ranks} ranks{mesh}, {batch} × {seq} tokens each, "
        f"{asked.precision}, recompute {asked.recompute}, {asked.optimizer}{''.join(besides)}"
    )


def plan_text(asked, found: dict) -> str:
    """Return a plan as text: its verdict, memory, collectives, and time."""
    where = found["where"] + (f", on rank {found['rank']}, which needs most" if found["rank"] else "")
    stages = [f"peaks of the stages  {', '.join(map(gib, found['stages']))}"] if asked.stages > 1 else []
    lines = [
        f"{title(asked)}; {KERNELS[asked.on_gpu]}",
        f"{found['parameters']:,} parameters{active(found)}; {not_modelled(asked)}",
        *routing_lines(asked, found["routing"]),
        "",
        verdict(asked, found["memory"]),
        "",
        *stages,
        f"peak of a rank      {gib(found['peak']):>14}   at: {where}",
        *(f"  {name:18}{gib(size):>14}" for name, size in found["by_category"].items()),
        f"persistent memory   {gib(sum(found['persistent'].values())):>14}",
        f"peak of step 1      {gib(found['first_step_peak']):>14}   before it there is no optimizer state",
        *(
            [f"in the CPU's memory {gib(sum(found['host'].values())):>14}   per rank, with what pinning rounds up"]
            if found["host"]
            else []
        ),
        "",
        "collectives of a step           size each   a rank sends   leave a node, in all",
    ]
    for c in found["traffic"]:
        sizes = [f"{size / 1e6:,.1f} MB" for size in (c["bytes"], c["count"] * c["rank"], c["count"] * c["node"])]
        along = f"   along {c['dimension']}" if c["dimension"] in ALONG else ""
        lines.append(f"  {c['count']:4} × {c['kind']:16}{sizes[0]:>17}{sizes[1]:>15}{sizes[2]:>23}{along}")
    lines += ["", *time_lines(asked, found)]
    if asked.on_gpu:
        lines += ["", COMPARED]
    return "\n".join(lines)


def active(found: dict) -> str:
    """Return how many parameters a token uses, if that is not all."""
    used = found["active_parameters"]
    return f", {used:,} active per token" if used != found["parameters"] else ""


def routing_lines(asked, routing: dict | None) -> list[str]:
    """Return what a rank's experts receive, if the model has experts."""
    if not routing:
        return []
    dropped = f", {routing['dropped']:.1%} of them dropped" if asked.capacity_factor else ""
    if asked.ep_degree == 1:
        return [f"{routing['rows']:,.0f} rows for experts in each block{dropped}"]
    spread = f"{routing['rows']:,.0f} ± {routing['deviation']:,.0f} rows"
    size = f"{routing['bytes'] / 1e6:,.3f} ± {routing['deviation_bytes'] / 1e6:,.3f} MB"
    return [  # compared with meters on the CPU, for given routings: tests/test_experts.py
        f"if tokens choose uniformly, a rank's experts receive {spread} in each block{dropped}: {size}; "
        f"planned: {routing['planned_rows']:,}"
    ]


def time_lines(asked, found: dict) -> list[str]:
    """Return a step's time, its throughput, and the cost of a training."""
    times, shares = found["seconds"], found["flops_utilisation"]
    waiting = f", the pipeline's bubble {times['bubble']:.3g} s" if times["bubble"] else ""
    lines = [
        (
            f"compute {times['compute']:.3g} s at {asked.efficiency:.0%} of {asked.peak_flops / 1e12:g} TFLOP/s, "
            f"communication {times['communication']:.3g} s{waiting}"
        ),
        f"a step takes {times['overlapped']:.3g} s overlapped, {times['serial']:.3g} s serial",
        f"{throughput(found)} tokens per second, all ranks together",
        f"overlapped, MFU {shares['MFU']:.0%} and HFU {shares['HFU']:.0%} of all ranks' peak: MFU counts all of attention, as PaLM does, "
        "HFU the half that a causal kernel computes, and what is recomputed",
    ]
    if found["host"]:
        optimizer = ", and the optimizer, which steps on the CPU" if asked.cpu_offload else ""
        lines.append(f"the time excludes copies to and from the CPU's memory{optimizer}")
    if booked := found["booking"]:
        lines.append(f"{asked.tokens:,.0f} tokens are {booked['steps']:,.0f} steps of {found['tokens_of_a_step']:,}:")
        costs = [("hours", booked["hours"]), ("GPU-hours", booked["gpu_hours"]), ("money", booked["money"])]
        lines.append("  " + ", ".join(f"{between(*range_)} {name}" for name, range_ in costs if range_))
    return lines


def between(low: float, high: float) -> str:
    """Return a range as text: one number, if both are the same in three digits."""
    shown = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (low, high)]
    return shown[0] if shown[0] == shown[1] else " to ".join(shown)


def throughput(found: dict) -> str:
    """Return the range of tokens per second, serial to overlapped."""
    return between(found["samples_per_second_at_least"], found["samples_per_second"])


def verdict(asked, memory: dict) -> str:
    """Return the answer, and the figures it rests on."""
    if not asked.on_gpu and asked.gpu_memory is None:
        together = gib((memory["least"] - memory["outside"]) * GIB * asked.ranks)
        return f"tensors take up to {together} of the CPU's memory, on {asked.ranks:,} ranks together; each process needs more"
    answer = memory["answer"]
    room = asked.memory - memory["needs" if answer == "fits" else "least"]
    rest = {
        "fits": f"{room:,.2f} GiB to spare",
        "tight": f"only if the allocator reserves nothing beyond the plan: it may lack {memory['needs'] - asked.memory:,.2f} GiB",
        "does not fit": f"{-room:,.2f} GiB too much, {memory['needs'] - asked.memory:,.2f} with what the allocator reserves",
    }[answer]
    which = f" of {asked.gpu}" if asked.gpu_memory is None else ""
    return (
        f"{answer}{dropout_note(asked) if answer != 'does not fit' else ''} in {asked.memory:g} GiB{which}: {rest}\n"
        f"  {memory['least']:,.2f} GiB planned, {memory['outside']:g} of them for {outside(memory)}; {memory['needs']:,.2f} with what "
        f"the allocator reserves (× {memory['reserve']:.3g}; {memory['source']}){communicator_notes(asked, memory)}"
    )


def outside(memory: dict) -> str:
    """Return what a process has on a GPU besides PyTorch's memory."""
    many = memory["communicators"]
    return "the context" + (f" and {many} communicator{'s' * (many > 1)}" if many else "")


def communicator_notes(asked, memory: dict) -> str:
    """Return lines on what is assumed of communicators, and on the meshes of --reshard-after-forward N; "": nothing."""
    low, high = REPORTED
    assumed = f"assumed: {COMMUNICATOR:g} GiB for each communicator after the first (reported: {low:g} to {high:g})"
    notes = [assumed] if memory["communicators"] > 1 else []
    if meshes := memory["post_forward_meshes"]:
        alone = "fully_shard builds 2 process groups for each unit"
        if asked.module:
            notes.append(
                f"warning: {alone}, {2 * meshes} here, which may also exceed what NVSwitch supports (NVIDIA/nccl#2077): "
                "share one mesh (labkit/training/post_forward_mesh.py)"
            )
        else:
            notes.append(f"{alone}; in {asked.lab} all units share 2 (labkit/training/post_forward_mesh.py)")
    return "".join(f"\n  {note}" for note in notes)


def explained(plan: Plan) -> str:
    """Return each term of the peak, the largest first, with its factors; the small ones together. Their sum is the peak."""
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
    """Return the table of --sweep."""
    lines = [
        (
            f"{asked.named} on {asked.ranks} ranks, {asked.memory:g} GiB each, {asked.batch_size} × {asked.seq_len:,} tokens, {asked.precision}; "
            f"predicted, at {asked.efficiency:.0%} of {asked.peak_flops / 1e12:g} TFLOP/s"
        ),
        f"{not_modelled(asked)}; equal places: less than 2 % apart",
        "left out: of each strategy, recomputation that saves more than the row that does not fit"
        + (", and what can only be simulated" if asked.third_party else ""),
        "",
        f"{'':4}{'strategy':30}{'recompute':11}{'planned':>13}{'reserved':>13}  {'tokens/s':18}",
    ]
    for row in rows:
        place = f"{row['place'] or '':>2}  "
        lines.append(f"{place}{row['strategy']:30}{row['recompute']:11}{row_text(asked, row)}")
    return "\n".join(lines)


def row_text(asked, row: dict) -> str:
    """Return the last columns of a table's row: planned, reserved, tokens per second, and the memory it lacks."""
    if row["answer"] == NOT_PLANNED:
        return f"{'':46}{NOT_PLANNED}: {row['why']}"
    if row.get("recompute") == "any":
        state = f"{row['least']:>9,.2f} GiB"
        return f"{state}{'':33}{row['answer']}: lacks {row['least'] - asked.memory:,.2f} GiB for its persistent memory alone"
    sizes = f"{row['least']:>9,.2f} GiB{row['needs']:>9,.2f} GiB  "
    if row["answer"] == "does not fit":
        return f"{sizes}{'':18} {row['answer']}: lacks {row['least'] - asked.memory:,.2f} GiB"
    return f"{sizes}{throughput(row):18} {row['answer']}"


def find_text(asked, found: dict) -> str:
    """Return the answer of --find, its reason, and a table of its neighbors."""
    what, number = found["what"], found["found"]
    tokens = {"ranks": "", "batch_size": " sequences per rank", "seq_len": " tokens per sequence"}[what]
    if number is None:
        head = f"no number of --{asked.find} fits in {asked.memory:g} GiB"
        head += f"; {found['tight']:,}{tokens} would be tight" if found["tight"] else ""
    else:
        head = f"{'the least' if what == 'ranks' else 'the most'} --{asked.find} that fits{dropout_note(asked)} in {asked.memory:g} GiB: {number:,}{tokens}"
        if found["tight"] != number:
            head += f"; {found['tight']:,} would be tight"
    lines = [head, reason(asked, found), f"{title(asked)}", not_modelled(asked), ""]
    lines.append(f"{'--' + asked.find:>12}{'planned':>13}{'reserved':>13}  {'tokens/s':18}")
    for row in found["rows"]:
        lines.append(f"{row[what]:>12,}{row_text(asked, row)}")
    return "\n".join(lines)


def reason(asked, found: dict) -> str:
    """Return why the search ended there."""
    what, rows = found["what"], {row[found["what"]]: row for row in found["rows"]}
    number = found["found"]
    beyond = rows.get((number or 0) + (-1 if what == "ranks" else found["unit"]))
    if number is None:
        row = next(iter(rows.values()))
        return f"({row[what]:,} needs {row['needs']:,.2f} GiB with what the allocator reserves: {advice(asked)})"
    if beyond is None:
        return "(the search ends there)"
    return f"({beyond[what]:,} needs {beyond['needs']:,.2f} GiB with what the allocator reserves, of {asked.memory:g})"


def advice(asked) -> str:
    """Return what may still be tried."""
    tried = {
        "--recompute full": asked.recompute != "full",
        "--loss-chunks 8": asked.loss_chunks == 1,
        "--cpu-offload": asked.strategy == "fsdp2" and not asked.cpu_offload,
        "--weights bf16": asked.precision == "bf16" and asked.weights == "fp32",
        "more --ranks": asked.find != "ranks",
        "a shorter --seq-len": asked.find != "seq-len",
    }
    return "try " + ", ".join(name for name, left in tried.items() if left)


def simulated_text(asked, found: dict) -> str:
    """Return the plan of a model whose peak is simulated: the user's own, or a third-party model."""
    kernels = f"simulated with {KERNELS[asked.on_gpu]}"
    if asked.module:
        how = f"{asked.strategy} on {asked.ranks} ranks, {asked.precision}, {asked.optimizer}"
        head = [f"{asked.module}: {_elements(found)} in {found['units']} units, {how}; {kernels}"]
    else:
        head = [f"{title(asked)}; {kernels}", f"{_elements(found)}; the library's own code, as {asked.why_simulated}"]
    if not asked.module and found["experts"]:
        head.append(
            f"experts by the library's {found['experts']}, which takes as much memory whichever experts are chosen"
        )
    lines = [
        *head,
        "",
        f"simulated peak of a rank  {gib(found['simulated']):>14}   at: {found['simulated_at']}",
        *(f"  {name:24}{gib(size):>14}" for name, size in found["simulated_by_category"].items()),
        f"{'simulated' if asked.splits_model else 'predicted'}, between steps  {gib(found['persistent']):>14}",
        "collectives of the simulated step:",
        *(
            f"  {c['count']:4} × {c['kind']:16}{c['bytes'] / 1e6:>12,.1f} MB" + _along(c["dimension"])
            for c in found["collectives"]
        ),
        "",
        verdict(asked, found["memory"]),
    ]
    if "seconds" in found:
        lines += ["", *time_lines(asked, found)]
    return "\n".join([*lines, "", SIMULATED] if asked.on_gpu else lines)


def _elements(found: dict) -> str:
    """Return the number of parameters, and of trained ones where they differ."""
    some = f", {found['trained']:,} trained" if found["trained"] != found["parameters"] else ""
    return f"{found['parameters']:,} parameters{some}"


def _along(dimension: str | None) -> str:
    """Return the mesh dimension of a collective, unless it is FSDP's only one."""
    return "" if dimension in (None, "shard", "fsdp") else f"   along {dimension}"


def run_text(title: str, plan: Plan) -> str:
    """Return a page on the memory and the collectives of one run, for a lab's --dry-run.

    Args:
        title: which run.
        plan: of the rank that needs most.
    """
    where, terms = plan.peak()
    persistent = total(plan.persistent())
    lines = [
        title,
        "",
        f"peak of a rank      {gib(total(terms)):>14}   at: {where}",
        *(f"  {name:18}{gib(size):>14}" for name, size in by_category(terms).items()),
        f"kept between steps  {gib(persistent):>14}",
        "collectives of a step",
        *(f"  {c['count']:4} × {c['kind']:16}{c['bytes'] / 1e6:>12,.1f} MB" for c in plan.traffic()),
    ]
    return "\n".join(lines)
