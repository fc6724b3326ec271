"""Exercises of chapter 00: what memory meters count."""

from planner import predict

from labkit.teaching.exercises import Do, Predict, unanswered

MIB = 2**20
NUMBERS = predict.numel(predict.SHAPES)

ROWS, COLUMNS, PAGE = 4096, 8192, 4096


def _cases():
    """Yield (description, tensors, bytes of their storages, the likely mistake behind another result)."""
    import torch

    x, y = torch.ones(100, 10), torch.ones(100, 10)
    yield "one tensor of 1,000 float32", [x], 4000, "elements × bytes per element"
    yield "1,000 elements in bfloat16", [x.bfloat16()], 2000, "not every element takes 4 bytes: read it from the tensor"
    yield "two tensors of the same shape", [x, y], 8000, "equal in size is not the same storage"
    yield "a tensor and a view of all of it", [x, x.view(-1)], 4000, "they share one storage, which counts once"
    yield "one row of a tensor", [x[0]], 4000, "a view keeps the whole storage alive, not only what it shows"
    yield "two halves of one tensor", [x[:50], x[50:]], 4000, "they start at different offsets of the same storage"
    yield "one element expanded to 1,000", [torch.ones(1).expand(1000)], 4, "the storage holds one element only"


def _judge(live_bytes) -> str:
    for case, tensors, expected, cause in _cases():
        result = live_bytes(tensors)
        if unanswered(result):
            return "not answered yet"
        if result != expected:
            return f"not quite: {case} occupy {expected:,} bytes, your function returns {result:,}: {cause}"
    return "right"


EXERCISES = {
    "00.1": Predict(
        title="parameters in double precision",
        level=1,
        minutes=3,
        answer=8 * NUMBERS / MIB,
        unit="MiB",
        slips={
            "that is fp32, with 4 bytes per parameter; double precision takes 8": 4 * NUMBERS / MIB,
            "that is in MB (1000²); memory is counted in MiB (1024²) here": 8 * NUMBERS / 1e6,
            "that is fc1 alone; the other layers are small, but they count": 8 * predict.numel(["fc1"]) / MIB,
            "64 is the number of bits; 8 bits are a byte": 64 * NUMBERS / MIB,
            "that is in bytes; the question is in MiB": 8 * NUMBERS,
        },
        hint="The network has 1,199,882 parameters. How many bytes is a 64-bit number? A MiB has 1024² bytes.",
        solution="""
# Parameter memory is elements × bytes per element. It does not depend on ranks, batch, or optimizer.
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
            "that is the whole tensor; the kernel allocates no page that is not touched": ROWS * COLUMNS * 4 / MIB,
            "those are the bytes written; the kernel allocates whole pages": ROWS * 4 / MIB,
            "that is one page; the elements of a column are not adjacent in memory": PAGE / MIB,
            "that counts one page per element in a row; a column has one element in each row": COLUMNS * PAGE / MIB,
        },
        hint="How many bytes are between x[0, 0] and x[1, 0]? Is that more or less than a page? How many pages are "
        "touched, then?",
        solution="""
# Neighbors in a column are one row apart: 8192 × 4 bytes = 32 KiB, or eight pages. Each element touches its own page,
# so writing 4,096 elements of 4 bytes makes 4,096 pages of 4 KiB resident.
rows, page = 4096, 4096
answer = rows * page / 2**20
""",
    ),
    "00.3": Do(
        title="live bytes",
        level=2,
        minutes=8,
        judge=_judge,
        hint="Ignore the shapes. Call tensor.untyped_storage() on each tensor: a storage has data_ptr() and nbytes(). "
        "Count each storage once.",
        solution="""
# Storages occupy memory; tensors are views of them. Several tensors may share a storage, and a view of a single row
# keeps the whole storage alive. Two storages are the same if they start at the same address.
def live_bytes(tensors):
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
""",
    ),
}
