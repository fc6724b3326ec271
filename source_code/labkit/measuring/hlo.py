# SPDX-License-Identifier: BSD-3-Clause
"""Read the collectives and the memory of a compiled JAX program from its HLO text. Imports neither JAX nor torch.

``compiled.as_text()`` of ``jax.jit(step).lower(…).compile()`` is the program of one device: a list of computations, each
a list of instructions. One computation is the entry. A collective names its devices by their row-major index in the
mesh. The body of a loop is listed once, with its number of iterations (``known_trip_count``) next to the loop. On GPUs a
collective is split into two instructions, …-start and …-done, so that others can run between them.

This file needs nothing else: copy it next to your own tests, or list the collectives of a program's text,

  python hlo.py step.txt fsdp=4,tensor=2         the file, and the mesh in its order
"""

import re
import sys
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
    """List the collectives that a program runs, as a record's ``traffic`` does.

    Args:
        text: the HLO text of a compiled program.
        axes: its mesh, {axis: number of devices along it}, in the mesh's order.

    Returns:
        [{"kind", "bytes", "dimension", "count"}, …]. bytes is the size of the whole tensor: the output of an all-gather,
        the input of a reduce-scatter. dimension is the axis of a group's devices, "fsdp+tensor" for two axes, None for
        groups of one device.

    Raises:
        ValueError: a collective is in a loop of unknown length or in a conditional branch, or a group does not lie along
            axes of this mesh.
    """
    entry, computations = _split(text)
    counts = Counter()
    for kind, size, dimension, count in _executed(computations, entry, axes):
        counts[kind, size, dimension] += count
    ordered = sorted(counts.items(), key=lambda item: (*item[0][:2], item[0][2] or ""))
    return [{"kind": k, "bytes": b, "dimension": d, "count": n} for (k, b, d), n in ordered]


def memory(compiled) -> dict[str, int]:
    """Return the bytes that a program needs on each device; XLA plans all memory at compile time.

    Args:
        compiled: the result of ``jax.jit(step).lower(…).compile()``.

    Returns:
        {"arguments", "outputs", "aliased", "temporary"}: aliased is the part of the outputs that reuses donated
        arguments, temporary everything else that is allocated during the program.
    """
    analysis = compiled.memory_analysis()
    names = {"arguments": "argument", "outputs": "output", "aliased": "alias", "temporary": "temp"}
    return {name: getattr(analysis, f"{theirs}_size_in_bytes") for name, theirs in names.items()}


def _split(text: str) -> tuple[str, dict]:
    """Split HLO text into (name of the entry computation, {name of a computation: its lines})."""
    entry, computations, lines = None, {}, []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        else:
            lines.append(line)
    if entry is None:
        raise ValueError("this is not the text of a compiled program: it has no ENTRY")
    return entry, computations


def _executed(computations: dict, name: str, axes: dict):
    """Yield (kind, bytes, dimension, count) of the collectives in a computation and in those that it calls."""
    for line in computations[name]:
        if not (instruction := _INSTRUCTION.match(line)):
            continue
        made, operator = instruction.groups()
        kind = operator.removesuffix("-start")
        if kind in KINDS:
            members, dimension = _group(line, axes)
            yield kind, _whole(kind, _result(made, operator), members), dimension, 1
        elif not operator.endswith(("-done", "-update")):  # they repeat the computation that their start calls
            yield from _inside(computations, line, axes)


def _inside(computations: dict, line: str, axes: dict):
    """Yield (kind, bytes, dimension, count) of the computations an instruction calls; a loop body counts once per trip."""
    inside = [each for name in _CALLED.findall(line) for each in _executed(computations, name, axes)]
    branches = [each for name in _BRANCHES.findall(line) for each in _executed(computations, name, axes)]
    trips = _TRIPS.search(line) if " while(" in line else ["", "1"]
    if branches or (inside and not trips):
        raise ValueError(f"the HLO does not specify how often these collectives run: {line.strip()[:120]}")
    for kind, size, dimension, count in inside:
        yield kind, size, dimension, count * int(trips[1])


def _result(made: str, operator: str) -> str:
    """Return the type of a collective's result. The type of a …-start is a tuple: operands, results, perhaps contexts."""
    if not operator.endswith("-start") or operator == "all-reduce-start":  # its type is that of its results
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
    """Return the bytes of a collective's whole tensors. result: its type. members: number of devices in a group."""
    size = sum(_bits(dtype) * prod(map(int, dims.split(",") if dims else ())) for dtype, dims in _ARRAY.findall(result))
    return ceil(size / 8) * (members if kind == "reduce-scatter" else 1)


def _bits(dtype: str) -> int:
    """Return the bits per element of an HLO type: f32, bf16, s64, f8e4m3fn; pred takes a byte."""
    return 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])


def _group(line: str, axes: dict) -> tuple[int, str | None]:
    """Return (number of devices in a group, names of the axes along which they lie) of a collective's line."""
    groups = _groups(line) or [list(range(prod(axes.values())))]  # no groups listed: all devices
    along = [axis for axis in axes if any(len({_coordinates(d, axes)[axis] for d in group}) > 1 for group in groups)]
    members = len(groups[0])
    if "source_target_pairs" not in line and members != prod(axes[axis] for axis in along):
        raise ValueError(f"the groups of this collective are not along axes of {axes}: {line.strip()[:120]}")
    return members, "+".join(along) or None


def _groups(line: str) -> list[list[int]]:
    """Return the devices of each group. XLA has three notations for them.

    ``{{0,1},{2,3}}`` lists them. ``[2,4]<=[4,2]T(1,0)`` is 0 to 7 as a 4 × 2 array, transposed and reshaped into 2 groups
    of 4. ``mesh['a'=4,'b'=2] {'b'}`` is a mesh whose groups lie along b, with XLA's own names of the axes; an optional
    ``device_ids=([4,2]T(1,0))`` gives the order of its devices.
    """
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})?\}", line):
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1] or "")]
    if iota := re.search(rf"replica_groups=\[([\d,]+)\]<={_LAID_OUT}", line):
        (_, members), devices = _numbers(iota[1]), _transposed_iota(_numbers(iota[2]), _numbers(iota[3]))
    elif mesh := re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_LAID_OUT}\))? \{{([^}}:]*)\}}", line):
        sizes, chosen = dict(each.split("=") for each in mesh[1].split(",")), mesh[4].split(",")
        dims, names = [int(size) for size in sizes.values()], list(sizes)
        members = prod(dims[names.index(name)] for name in chosen)
        ids = _transposed_iota(_numbers(mesh[2]), _numbers(mesh[3])) if mesh[2] else range(prod(dims))
        ordered = sorted(range(len(dims)), key=lambda d: names[d] in chosen)  # a group's axes last: it is contiguous
        devices = [ids[index] for index in _transposed_iota(dims, ordered)]
    else:
        raise ValueError(f"unknown notation for the devices of this collective: {line.strip()[:120]}")
    return [devices[i : i + members] for i in range(0, len(devices), members)]


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in (text or "").split(",") if number]


def _transposed_iota(dims: list[int], order: list[int]) -> list[int]:
    """Return iota(dims), transposed to ``order`` (unless it is empty), in row-major order."""
    strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
    ids = [0]
    for dimension in order or range(len(dims)):
        ids = list(chain.from_iterable([d + i * strides[dimension] for i in range(dims[dimension])] for d in ids))
    return ids


def _coordinates(device: int, axes: dict) -> dict:
    """Return a device's coordinates in the mesh, {axis: index along it}."""
    coordinates = {}
    for axis, size in reversed(axes.items()):
        device, coordinates[axis] = divmod(device, size)
    return coordinates


def main():
    if len(sys.argv) != 3 or not re.fullmatch(r"\w+=\d+(,\w+=\d+)*", sys.argv[2]):
        sys.exit("usage: python hlo.py FILE AXIS=SIZE,AXIS=SIZE")
    axes = {axis: int(size) for axis, size in (pair.split("=") for pair in sys.argv[2].split(","))}
    try:
        with open(sys.argv[1]) as file:
            found = collectives(file.read(), axes)
    except (OSError, ValueError) as error:
        sys.exit(f"hlo.py: {error}")
    print(f"{'kind':20} {'along':16} {'bytes':>14} {'times':>7}")
    for each in found:
        print(f"{each['kind']:20} {each['dimension'] or '-':16} {each['bytes']:14,} {each['count']:7,}")


if __name__ == "__main__":
    main()
