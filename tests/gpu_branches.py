# SPDX-License-Identifier: BSD-3-Clause
"""Print which lines that only a GPU executes no test has run: ``make coverage`` ends with it.

Such lines are the branches of conditions on the device, the backend, or the GPUs there are, what follows a guard that
leaves the function on a CPU, and calls of torch.cuda. The measurement includes ranks, in processes of their own.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[1]
GPU = re.compile(r"cuda|nccl|\bgpus?\b|on_gpus?\b|on_cpu\b", re.IGNORECASE)
NO_GPU = re.compile(r"\bnot\b|!=|on_cpu\b")  # of a guard: what follows it needs a GPU
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
COMPOUND = (ast.stmt, ast.ExceptHandler, ast.match_case)


def gpu_lines(block: list[ast.AST], condition: str = "") -> Iterator[tuple[int, str]]:
    """Yield (line, condition) of every statement that may need a GPU; the condition is "" for a call of torch.cuda."""
    for node in block:
        if isinstance(node, ast.stmt):
            own = [] if any(hasattr(node, name) for name in BLOCKS) else [node]
            if condition or any("torch.cuda." in ast.unparse(each) for each in own):
                yield node.lineno, condition
        inner = condition
        if isinstance(node, ast.If) and GPU.search(ast.unparse(node.test)):
            inner = f"if {ast.unparse(node.test)}"
            if isinstance(node.body[-1], LEAVES) and NO_GPU.search(inner):
                condition = f"after {inner}"  # for the statements that follow in this block
        for name in BLOCKS:
            yield from gpu_lines([each for each in getattr(node, name, ()) if isinstance(each, COMPOUND)], inner)


def unexecuted(path: Path, missing: set[int]) -> list[tuple[int, int, str]]:
    """Return (first line, last line, condition) of a file's lines for a GPU that are missing; neighbors are joined."""
    found = []
    for line, condition in sorted(gpu_lines(ast.parse(path.read_text()).body)):
        if line not in missing:
            continue
        if found and found[-1][2] == condition and not set(range(found[-1][1] + 1, line)) - missing:
            found[-1] = (found[-1][0], line, condition)
        else:
            found.append((line, line, condition))
    return found


def main():
    measured = coverage.Coverage(config_file=str(ROOT / "pyproject.toml"))
    measured.load()
    total = executed = 0
    for path in sorted((ROOT / "source_code").rglob("*.py")):
        _, statements, _, missing, _ = measured.analysis2(str(path))
        total, executed = total + len(statements), executed + len(statements) - len(missing)
        for first, last, condition in unexecuted(path, set(missing)):
            lines = f"{first}" if first == last else f"{first}-{last}"
            print(f"{path.relative_to(ROOT)}:{lines}  {condition}".rstrip())
    print(f"{executed:,} of {total:,} statements of source_code were executed. Above: those for a GPU that were not.")


if __name__ == "__main__":
    main()
