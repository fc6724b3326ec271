"""Exercises of chapter 00: what a meter counts."""

from planner import predict

from labkit.teaching.exercises import Do, Predict, unanswered

MIB = 2**20
NUMBERS = predict.numel(predict.SHAPES)

ROWS, COLUMNS, PAGE = 4096, 8192, 4096


def _cases():
    """(what the tensors are, the tensors, the bytes they keep, what is wrong if another number comes out)."""
    import torch

    x, y = torch.ones(100, 10), torch.ones(100, 10)
    yield "one tensor of 1,000 float32", [x], 4000, "numbers × bytes per number"
    yield "1,000 numbers in bfloat16", [x.bfloat16()], 2000, "not every number has 4 bytes: ask the tensor"
    yield "two tensors of the same shape", [x, y], 8000, "equal in size is not the same storage"
    yield "a tensor and a view of all of it", [x, x.view(-1)], 4000, "they share one storage, which counts once"
    yield "one row of a tensor", [x[0]], 4000, "a view keeps the whole storage alive, not only what it shows"
    yield "two halves of one tensor", [x[:50], x[50:]], 4000, "they start at different places of the same storage"
    yield "one number expanded to 1,000", [torch.ones(1).expand(1000)], 4, "the storage holds one number only"


def _judge(live_bytes) -> str:
    for case, tensors, expected, cause in _cases():
        given = live_bytes(tensors)
        if unanswered(given):
            return "not answered yet"
        if given != expected:
            return f"not quite: {case} keep {expected:,} bytes, your function says {given:,}: {cause}"
    return "right"


EXERCISES = {
    "00.1": Predict(
        title="parameters in double precision",
        level=1,
        minutes=3,
        answer=8 * NUMBERS / MIB,
        unit="MiB",
        slips={
            "those are fp32's 4 bytes per number; double precision takes 8": 4 * NUMBERS / MIB,
            "that is in MB (1000²); memory is counted in MiB (1024²) here": 8 * NUMBERS / 1e6,
            "that is fc1 alone; the other layers are small, but not nothing": 8 * predict.numel(["fc1"]) / MIB,
            "64 is the number of bits; 8 bits are a byte": 64 * NUMBERS / MIB,
            "that is in bytes; the question is in MiB": 8 * NUMBERS,
        },
        hint="The network has 1,199,882 parameters. How many bytes has a number of 64 bits? A MiB has 1024² bytes.",
        solution="""
# Parameters are numbers times bytes per number, nothing else: no rank, no batch, no optimizer comes in.
answer = 1_199_882 * 8 / 2**20
""",
    ),
    "00.2": Predict(
        title="one column written",
        level=2,
        minutes=5,
        answer=ROWS * PAGE / MIB,
        unit="MiB",
        slips={
            "that is the whole tensor; pages that are not touched are not handed out": ROWS * COLUMNS * 4 / MIB,
            "those are the numbers written; the kernel hands out whole pages": ROWS * 4 / MIB,
            "that is one page; the numbers of a column do not lie side by side": PAGE / MIB,
            "that counts a page for each number of a row; a column has as many numbers as there are rows": COLUMNS
            * PAGE
            / MIB,
        },
        hint="How many bytes lie between x[0, 0] and x[1, 0]? Is that more or less than a page? So how many pages are "
        "touched?",
        solution="""
# Neighbours in a column lie a row apart: 8192 x 4 bytes = 32 KiB, eight pages. Each number touches a page of its own,
# so 4,096 numbers of 4 bytes bring in 4,096 pages of 4 KiB.
rows, page = 4096, 4096
answer = rows * page / 2**20
""",
    ),
    "00.3": Do(
        title="live bytes",
        level=2,
        minutes=8,
        judge=_judge,
        hint="Do not ask the tensors for their shape. Ask each for tensor.untyped_storage(), which has data_ptr() and "
        "nbytes(), and count each storage once.",
        solution="""
# What occupies memory is a storage. Tensors are ways of looking at one: several may look at the same, and one that
# shows a single row keeps all of it alive. The address where a storage begins tells whether two are the same.
def live_bytes(tensors):
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
""",
    ),
}
