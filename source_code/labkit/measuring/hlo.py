"""What a compiled JAX program sends and needs, read from XLA's text of it (HLO). Imports neither JAX nor torch.

``compiled.as_text()`` of ``jax.jit(step).lower(…).compile()`` is the program of one device: computations, each a list
of instructions, one of them the entry. A collective names the devices that take part by their place in the mesh,
counted row by row. A loop's body stands there once, and how often it runs stands beside the loop
(``known_trip_count``). On GPUs a collective is two instructions, …-start and …-done, so that others run between them.
"""

import re
from collections import Counter
from itertools import chain
from math import ceil, prod

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = (.+?) ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{|true_computation=|false_computation=)%?([\w.\-]+)")
_TRIPS = re.compile(r"known_trip_count\D*(\d+)")
_LAID_OUT = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


def collectives(text: str, axes: dict[str, int]) -> list[dict]:
    """The collectives that a program runs: [{"kind", "bytes", "dimension", "count"}, …], as a record's ``traffic``.

    text: of a compiled program. axes: its mesh, {axis: devices along it}, in the mesh's order. bytes: of the whole
    tensor, as elsewhere in the course: what an all-gather makes, what a reduce-scatter takes. dimension: the axis
    along which the devices of a group lie, "fsdp+tensor" for two, None where each is alone. ValueError: collectives
    in a loop of unknown length or in one branch of several, or a group that no axes of this mesh make.
    """
    entry, computations = _split(text)
    found = Counter()
    for kind, size, dimension, count in _executed(computations, entry, axes):
        found[kind, size, dimension] += count
    ordered = sorted(found.items(), key=lambda item: (*item[0][:2], item[0][2] or ""))
    return [{"kind": k, "bytes": b, "dimension": d, "count": n} for (k, b, d), n in ordered]


def memory(compiled) -> dict[str, int]:
    """What the compiler says that a program needs on each device, in bytes: it plans all memory before the first run.

    aliased: of the outputs, what takes the place of a donated argument. temporary: everything in between.
    """
    found = compiled.memory_analysis()
    names = {"arguments": "argument", "outputs": "output", "aliased": "alias", "temporary": "temp"}
    return {name: getattr(found, f"{theirs}_size_in_bytes") for name, theirs in names.items()}


def _split(text: str) -> tuple[str, dict]:
    """(the entry's name, {name of a computation: its lines})."""
    entry, computations, lines = None, {}, []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        else:
            lines.append(line)
    if entry is None:
        raise ValueError("this is no text of a compiled program: it has no ENTRY")
    return entry, computations


def _executed(computations: dict, name: str, axes: dict):
    """Yield (kind, bytes, dimension, how often) of what a computation runs, itself and through others."""
    for line in computations[name]:
        if not (instruction := _INSTRUCTION.match(line)):
            continue
        made, operator = instruction.groups()
        kind = operator.removesuffix("-start")
        if kind in KINDS:
            members, dimension = _group(line, axes)
            yield kind, _whole(kind, _result(made, operator), members), dimension, 1
        elif not operator.endswith(("-done", "-update")):  # they name what their start has called
            yield from _inside(computations, line, axes)


def _inside(computations: dict, line: str, axes: dict):
    """Yield likewise what an instruction calls: a loop's body as often as it runs."""
    inside = [each for name in _CALLED.findall(line) for each in _executed(computations, name, axes)]
    branches = [each for name in _BRANCHES.findall(line) for each in _executed(computations, name, axes)]
    trips = _TRIPS.search(line) if " while(" in line else ["", "1"]
    if branches or (inside and not trips):
        raise ValueError(f"how often the collectives in this run cannot be read: {line.strip()[:120]}")
    for kind, size, dimension, count in inside:
        yield kind, size, dimension, count * int(trips[1])


def _result(made: str, operator: str) -> str:
    """The type of a collective's result. A start makes a tuple of its operands, its results and perhaps more."""
    if not operator.endswith("-start") or operator == "all-reduce-start":  # which makes its results alone
        return made
    depth, parts = 0, [""]
    for character in made[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts[1]


def _whole(kind: str, result: str, members: int) -> int:
    """Bytes of the whole tensors of a collective, of its result's type and the number of devices in a group."""
    size = sum(
        _bits(number) * prod(map(int, dims.split(",") if dims else ())) for number, dims in _ARRAY.findall(result)
    )
    return ceil(size / 8) * (members if kind == "reduce-scatter" else 1)


def _bits(number: str) -> int:
    """Bits of an HLO number: f32, bf16, s64, f8e4m3fn; pred takes a byte."""
    return 8 if number == "pred" else int(re.search(r"\d+", number)[0])


def _group(line: str, axes: dict) -> tuple[int, str | None]:
    """(devices in a group, the axes along which they lie) of a collective's line."""
    groups = _groups(line) or [list(range(prod(axes.values())))]  # none given: all devices
    along = [axis for axis in axes if any(len({_place(d, axes)[axis] for d in group}) > 1 for group in groups)]
    members = len(groups[0])
    if "source_target_pairs" not in line and members != prod(axes[axis] for axis in along):
        raise ValueError(f"the groups of this collective are not along axes of {axes}: {line.strip()[:120]}")
    return members, "+".join(along) or None


def _groups(line: str) -> list[list[int]]:
    """The devices of each group, which XLA writes in one of three ways.

    ``{{0,1},{2,3}}``. ``[2,4]<=[4,2]T(1,0)``: 0 to 7 laid out as 4 × 2, turned, and read row by row into 2 groups of 4.
    ``mesh['a'=4,'b'=2] {'b'}``: laid out as a mesh, of which a group lies along b; its axes have names of XLA's own. In
    it ``device_ids=([4,2]T(1,0))`` are the devices that are laid out.
    """
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})?\}", line):
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1] or "")]
    if iota := re.search(rf"replica_groups=\[([\d,]+)\]<={_LAID_OUT}", line):
        (_, members), devices = _numbers(iota[1]), _turned(_numbers(iota[2]), _numbers(iota[3]))
    elif mesh := re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_LAID_OUT}\))? \{{([^}}:]*)\}}", line):
        sizes, chosen = dict(each.split("=") for each in mesh[1].split(",")), mesh[4].split(",")
        dims, names = [int(size) for size in sizes.values()], list(sizes)
        members = prod(dims[names.index(name)] for name in chosen)
        ids = _turned(_numbers(mesh[2]), _numbers(mesh[3])) if mesh[2] else range(prod(dims))
        ordered = sorted(range(len(dims)), key=lambda d: names[d] in chosen)  # theirs last, to be read row by row
        devices = [ids[place] for place in _turned(dims, ordered)]
    else:
        raise ValueError(f"the devices of this collective cannot be read: {line.strip()[:120]}")
    return [devices[i : i + members] for i in range(0, len(devices), members)]


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in (text or "").split(",") if number]


def _turned(dims: list[int], order: list[int]) -> list[int]:
    """0, 1, … laid out row by row in these dimensions, and read with the dimensions in another order, if one is given."""
    steps = [prod(dims[i + 1 :]) for i in range(len(dims))]
    found = [0]
    for dimension in order or range(len(dims)):
        found = list(chain.from_iterable([d + i * steps[dimension] for i in range(dims[dimension])] for d in found))
    return found


def _place(device: int, axes: dict) -> dict:
    """{axis: where a device lies along it}."""
    place = {}
    for axis, size in reversed(axes.items()):
        device, place[axis] = divmod(device, size)
    return place
