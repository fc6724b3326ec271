"""Shorten a run's output for a notebook page: the program's own lines, and the error."""

import re

NOISE = ("  ", "starting ", "Traceback ", "srun: launch", "srun: Force", "slurmstepd-")
FINGERPRINT = re.compile(r"OpType=(\w+), TensorShape=\[([\d, ]+)\]")
OWN = re.compile(r'  File ".*?/?(?P<file>\w+\.py)", line (?P<line>\d+), in (?P<function>.*)')


def folded(printed: str, own: tuple[str, ...], width: int = 108, most: int = 14) -> str:
    """Return the last lines of an output, keeping only the traceback frames in files of the program.

    Args:
        printed: the output.
        own: names of the program's files.
        width: most characters per line.
        most: most lines.
    """
    lines, frames = [], printed.splitlines()
    for line, below in zip(frames, [*frames[1:], ""], strict=True):
        frame = OWN.match(line)
        if frame and frame["file"] in own:
            lines.append(f"  {frame['file']}:{frame['line']} in {frame['function']}:  {below.strip()}")
        elif line.startswith("  what():") or (line.strip() and not line.startswith(NOISE)):
            lines.append(re.sub(r"(?<![\w.…])/[\w./-]+/", "…/", line.strip()))
    return "\n".join(line if len(line) <= width else line[: width - 1] + "…" for line in lines[-most:])


def own_collective(error: str) -> str:
    """Return the collective that the failing rank was about to call, or "".

    error: the message of ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, which names the rank's own collective first.
    """
    match = FINGERPRINT.search(error)
    return f"{match[1]} of {match[2]} numbers" if match else ""
