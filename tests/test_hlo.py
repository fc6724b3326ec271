# SPDX-License-Identifier: BSD-3-Clause
"""What is read from a compiled JAX program: each collective as often as it runs, its bytes, the axis of the mesh."""

import json
import shutil
import subprocess
import sys

import pytest
from labkit.measuring import hlo

EIGHT = {"fsdp": 8}
MESH = {"fsdp": 4, "tensor": 2}  # devices 0 1 / 2 3 / 4 5 / 6 7


def program(*lines: str, others: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule jit_step\n{others}\nENTRY %main.7_spmd (x: f32[2]) -> f32[2] {{\n{body}\n}}\n"


def computation(name: str, *lines: str) -> str:
    return f"%{name} (p: f32[2]) -> f32[2] {{\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"


def only(text: str, axes: dict = EIGHT) -> tuple:
    """(kind, bytes, dimension, count) of a program's one collective."""
    (found,) = hlo.collectives(text, axes)
    return tuple(found[name] for name in ("kind", "bytes", "dimension", "count"))


GATHER = "%g = f32[8,3]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
SCATTER = "%s = bf16[2]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (GATHER, ("all-gather", 4 * 24, "fsdp", 1)),
        (SCATTER, ("reduce-scatter", 2 * 16, "fsdp", 1)),  # of what it takes
        ("ROOT %r = f64[] all-reduce(%p), replica_groups={}, to_apply=%add", ("all-reduce", 8, "fsdp", 1)),
        (  # combined from two
            "%r = (f32[2,16]{1,0}, /*index=1*/pred[5]{0}) all-reduce(%p, %q), replica_groups=[1,8]<=[8], to_apply=%add",
            ("all-reduce", 4 * 32 + 5, "fsdp", 1),
        ),
        (
            "%c = s8[6]{0:T(4,128)} collective-permute(%p), source_target_pairs={{0,1},{1,2},{7,0}}",
            ("collective-permute", 6, "fsdp", 1),
        ),
    ],
)
def test_a_collective_is_read_with_the_bytes_of_the_whole_tensor(line, found):
    assert only(program(line)) == found


ABOUT = "channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}"


@pytest.mark.parametrize(
    ("start", "others", "found"),
    [
        ("(f32[2]{0}, f32[16]{0}) all-gather-start", "", ("all-gather", 64, "fsdp", 1)),
        ("((f32[2], f32[4,1]), (f32[16], f32[32,1])) all-gather-start", "", ("all-gather", 192, "fsdp", 1)),
        ("((f32[16]{0}), f32[2]{0}) reduce-scatter-start", "", ("reduce-scatter", 64, "fsdp", 1)),
        ("(f32[16]{0}, f32[3]{0}) all-reduce-start", "", ("all-reduce", 76, "fsdp", 1)),
        ("(f32[16], f32[16], u32[], u32[]) collective-permute-start", "", ("collective-permute", 64, "fsdp", 1)),
        ("((f32[16]), f32[2]) async-start", f"f32[2] reduce-scatter(%p), {ABOUT}", ("reduce-scatter", 64, "fsdp", 1)),
    ],
)
def test_a_start_and_its_done_are_one_collective(start, others, found):
    """As XLA writes them for GPUs; an async-start names a computation in which the collective stands."""
    about = "calls=%wrapped" if others else ABOUT
    done = start.split(") ")[-1].replace("-start", "-done")
    lines = f"%a = {start}(%x), {about}", f"%b = f32[16]{{0}} {done}(%a), {about}"
    if "permute" in start:
        lines = tuple(line.replace("replica_groups=[1,8]<=[8]", "source_target_pairs={{0,1},{1,0}}") for line in lines)
    assert only(program(*lines, others=computation("wrapped", f"ROOT %c = {others}") if others else "")) == found


@pytest.mark.parametrize(
    ("groups", "dimension"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", "fsdp"),
        ("{{0,1},{2,3},{4,5},{6,7}}", "tensor"),
        ("{{0,1,2,3,4,5,6,7}}", "fsdp+tensor"),
        ("[4,2]<=[8]", "tensor"),
        ("[2,4]<=[4,2]T(1,0)", "fsdp"),
        ("[1,8]<=[8]", "fsdp+tensor"),
        ("{}", "fsdp+tensor"),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", "fsdp"),
        ("mesh['axis_0'=1,'axis_1'=4,'axis_2'=2] {'axis_2'}", "tensor"),
        ("mesh['axis_0'=8,'axis_1'=1] {'axis_0'}", "fsdp+tensor"),
        ("mesh['axis_0'=1,'axis_1'=2,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_1'}", "tensor"),
        ("mesh['axis_0'=1,'axis_1'=2,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_2'}", "fsdp"),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", None),
    ],
)
def test_the_axis_is_told_from_the_groups(groups, dimension):
    text = program(f"%r = f32[2]{{0}} all-reduce(%p), replica_groups={groups}, use_global_device_ids=true, to_apply=%a")
    assert only(text, MESH) == ("all-reduce", 8, dimension, 1)


def test_three_axes_and_a_turn_of_them():
    line = "%g = f32[16]{0} all-gather(%p), replica_groups=[4,2]<=[2,2,2]T(2,0,1), dimensions={0}"
    assert hlo._groups(line) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert only(program(line), {"replica": 2, "fsdp": 2, "tensor": 2}) == ("all-gather", 64, "fsdp", 1)


def loop(body: str, trips: str = '"known_trip_count":{"n":"3"}') -> str:
    return f"%w = (s32[]) while(%t), condition=%cond, body=%{body}, backend_config={{{trips}}}"


def test_a_loop_is_multiplied_out_and_calls_are_followed():
    others = computation("inner", GATHER, SCATTER) + computation("called", loop("inner"), GATHER)
    others += computation("body", "%c = f32[2] call(%p), to_apply=%called", SCATTER) + computation("cond")
    text = program(loop("body", '"known_trip_count":{"n":"5"}'), GATHER, others=others)
    counts = {found["kind"]: found["count"] for found in hlo.collectives(text, EIGHT)}
    assert counts == {"all-gather": 5 * (3 + 1) + 1, "reduce-scatter": 5 * (3 + 1)}


def test_what_cannot_be_read_is_an_error_and_no_guess():
    both = computation("body", GATHER) + computation("cond")
    with pytest.raises(ValueError, match="how often"):
        hlo.collectives(program(loop("body", trips=""), others=both), EIGHT)
    branch = "%c = f32[2] conditional(%i, %a, %b), branch_computations={%body, %cond}"
    with pytest.raises(ValueError, match="how often"):
        hlo.collectives(program(branch, others=both), EIGHT)
    with pytest.raises(ValueError, match="not along axes"):
        hlo.collectives(program("%r = f32[2] all-reduce(%p), replica_groups={{0,3},{1,2}}"), {"fsdp": 2, "tensor": 2})
    with pytest.raises(ValueError, match="devices of this collective"):
        hlo.collectives(program("%r = f32[2] all-reduce(%p), replica_groups=mesh['x'=8] {'x':(1)4}"), EIGHT)
    with pytest.raises(ValueError, match="not the text of a compiled program"):
        hlo.collectives("", EIGHT)
    quiet = program(loop("cond", trips=""), others=computation("cond"))
    assert hlo.collectives(quiet, EIGHT) == []  # an unknown number of nothing


def test_alone_in_a_folder_it_lists_a_program(tmp_path):
    """As a reader copies it: without the course, without JAX; what cannot be read is one sentence."""
    shutil.copy(hlo.__file__, tmp_path)
    (tmp_path / "step.txt").write_text(program(GATHER, SCATTER))
    (tmp_path / "other.txt").write_text("no program")

    def listed(*words):
        command = [sys.executable, "-I", "hlo.py", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    lines = listed("step.txt", "fsdp=8").stdout.splitlines()[1:]
    assert [line.split() for line in lines] == [
        ["all-gather", "fsdp", "96", "1"],
        ["reduce-scatter", "fsdp", "32", "1"],
    ]
    for words, said in [(("other.txt", "fsdp=8"), "no ENTRY"), (("none.txt", "a=1"), "none.txt"), (("x",), "usage")]:
        done = listed(*words)
        assert (done.returncode, done.stdout) == (1, "") and said in done.stderr and done.stderr.count("\n") == 1


COMPILED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
from labkit.measuring import hlo

mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)

def loss(weights, x):
    def block(h, shard):
        return h @ jax.lax.all_gather(shard, "fsdp", axis=0, tiled=True), None
    return jax.lax.pmean((jax.lax.scan(jax.checkpoint(block), x, weights)[0] ** 2).mean(), ("fsdp", "tensor"))

specs = P(None, "fsdp", None), P(("fsdp", "tensor"))
step = jax.value_and_grad(jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P()))
compiled = jax.jit(step).lower(jnp.zeros((3, 16, 16)), jnp.zeros((16, 16))).compile()
print(json.dumps([hlo.collectives(compiled.as_text(), {"fsdp": 4, "tensor": 2}), hlo.memory(compiled)]))
"""


@pytest.mark.long
def test_a_program_compiled_here_has_the_collectives_that_were_written(tmp_path):
    """Three blocks whose weights are gathered twice each, recomputed; their gradients reduce-scattered, then summed
    over the other axis; and the loss, averaged over both."""
    (tmp_path / "compiled.py").write_text(COMPILED)
    source = hlo.__file__.rsplit("/labkit/", 1)[0]
    command = [sys.executable, tmp_path / "compiled.py", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found, memory = json.loads(done.stdout)
    sent = {(each["kind"], each["dimension"]): each["count"] * each["bytes"] for each in found}
    assert sent["all-gather", "fsdp"] == 2 * 3 * 16 * 16 * 4
    assert sent["reduce-scatter", "fsdp"] == 3 * 16 * 16 * 4
    assert sent["all-reduce", "fsdp+tensor"] == 4
    assert {kind for kind, _ in sent} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert memory["arguments"] == 3 * 4 * 16 * 4 + 2 * 16 * 4  # a fourth of the weights, an eighth of x
    assert memory["outputs"] >= 3 * 4 * 16 * 4 + 4
    assert memory["aliased"] == 0 < memory["temporary"]
