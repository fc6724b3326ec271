# SPDX-License-Identifier: BSD-3-Clause
"""Trace training steps with PyTorch's profiler, and reduce each to two lanes: operators, and collectives of gloo.

FSDP2's ranges ("FSDP::…") and gloo's ("gloo:…") are names that PyTorch's own code gives them.
"""

import json
import tempfile
from collections import Counter

STEP = "one step"
CALLS = {
    "c10d::allreduce_": "all-reduce",
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
}
GATHER, UNPACK, REDUCE = "FSDP::all_gather", "FSDP::all_gather_copy_out", "FSDP::post_backward_reduce"


def trace_steps(step, count: int) -> list[dict]:
    """Run ``step()`` ``count`` times under the profiler, and return ``lanes_of`` of each."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(count):
            with record_function(STEP):
                step()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        with open(file.name) as trace:
            events = [event for event in json.load(trace)["traceEvents"] if event.get("ph") == "X"]
    steps = sorted((event for event in events if event["name"] == STEP), key=lambda event: event["ts"])
    return [lanes_of(step, events) for step in steps]


def lanes_of(step: dict, events: list[dict]) -> dict:
    """Reduce the events of a Chrome trace to what one step did.

    Args:
        step: the event that spans the step.
        events: all complete events of this rank, with "name", "ts" and "dur" in microseconds, and "tid".

    Returns:
        {"begin", "end": seconds; "operators": [(begin, end), …] of the step's own thread, joined where they overlap;
        "collectives": [(kind, begin, end), …] as gloo ran them; "calls": {kind: how many were called};
        "early": how many gathers have a matmul between their call and the use of their result;
        "waited": {"gather": n, "reduction": n}, how many were over before the part of FSDP2 that had called them went on}.
    """
    begin, end = step["ts"], step["ts"] + step["dur"]
    inside = sorted((event for event in events if begin <= event["ts"] < end), key=lambda event: event["ts"])
    spans = [(event["name"], event["ts"], event["ts"] + event["dur"], event["tid"] == step["tid"]) for event in inside]
    wire = [(name[5:].replace("_", "-"), b / 1e6, e / 1e6) for name, b, e, _ in spans if name.startswith("gloo:")]
    return {
        "begin": begin / 1e6,
        "end": end / 1e6,
        "operators": _joined((b / 1e6, e / 1e6) for name, b, e, own in spans if own and name.startswith("aten::")),
        "collectives": wire,
        "calls": dict(Counter(CALLS[name] for name, *_ in spans if name in CALLS)),
        "early": _called_early([name for name, *_ in spans]),
        "waited": {kind: _waited(spans, kind) for kind in ("gather", "reduction")},
    }


def _joined(intervals) -> list[tuple[float, float]]:
    """Join sorted intervals that overlap."""
    joined = []
    for begin, end in intervals:
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _called_early(names: list[str]) -> int:
    """Count the gathers with a matmul between their call and the use of their result. names: in order of time."""
    matmuls, early = {}, 0
    for name in names:
        if name.startswith(UNPACK):
            early += matmuls.pop(name.removeprefix(UNPACK), 0) > 0
        elif name.startswith(GATHER):
            matmuls[name.removeprefix(GATHER)] = 0
        elif name == "aten::mm":
            matmuls = {unit: count + 1 for unit, count in matmuls.items()}
    return early


def _waited(spans: list[tuple], kind: str) -> int:
    """Count the collectives of a kind that were over before the range that had called them was."""
    range_name = GATHER if kind == "gather" else REDUCE
    ranges = [(b, e) for name, b, e, _ in spans if name.startswith(range_name) and not name.startswith(UNPACK)]
    ends = [e for name, _, e, _ in spans if name.startswith("gloo:") and ("gather" in name) == (kind == "gather")]
    return sum(any(begin < end <= over for begin, over in ranges) for end in ends)
