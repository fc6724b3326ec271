"""What a run printed, folded to what matters: the program's own lines, and the error. For a page, not for a search."""

import re

NOISE = ("  ", "starting ", "Traceback ", "srun: launch", "srun: Force", "slurmstepd-")
FINGERPRINT = re.compile(r"OpType=(\w+), TensorShape=\[([\d, ]+)\]")
OWN = re.compile(r'  File ".*?/?(?P<file>\w+\.py)", line (?P<line>\d+), in (?P<function>.*)')


def folded(printed: str, own: tuple[str, ...], width: int = 108, most: int = 14) -> str:
    """The last lines of an output, at most so many of so many characters; of a traceback only frames in the files ``own``."""
    lines, frames = [], printed.splitlines()
    for line, below in zip(frames, [*frames[1:], ""], strict=True):
        frame = OWN.match(line)
        if frame and frame["file"] in own:
            lines.append(f"  {frame['file']}:{frame['line']} in {frame['function']}:  {below.strip()}")
        elif line.startswith("  what():") or (line.strip() and not line.startswith(NOISE)):
            lines.append(re.sub(r"(?<![\w.…])/[\w./-]+/", "…/", line.strip()))
    return "\n".join(line if len(line) <= width else line[: width - 1] + "…" for line in lines[-most:])


def own_collective(error: str) -> str:
    """What the rank that raised it was about to call, from the message of ``TORCH_DISTRIBUTED_DEBUG=DETAIL``; "" if none."""
    found = FINGERPRINT.search(error)  # its own comes first
    return f"{found[1]} of {found[2]} numbers" if found else ""
