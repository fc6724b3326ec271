# SPDX-License-Identifier: BSD-3-Clause
"""A lab that trains a small model on few digits, untraced: a run of many steps, saves and epochs takes a second.

  python few_digits.py COUNT LAB WORDS…

COUNT: of the training set and at most of the test set, for mnist_fsdp. LAB: it, or gpt_fsdp. WORDS: the lab's own.
"""

import dataclasses
import importlib
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "source_code"


def keep(count: int):
    """From now on, a data set that is loaded in this process, or in a rank that it forks, has so many digits."""
    from labkit.training import datasets

    load = datasets.load
    datasets.load = lambda *given: datasets.Digits(given[0], *(tensor[:count] for tensor in load(*given).tensors()))


def narrow():
    """From now on, mnist_fsdp.py's network has a quarter of its channels and hidden numbers, and takes a tenth of the time."""
    import mnist_fsdp
    from torch import nn

    class Narrow(mnist_fsdp.Net):
        def __init__(self, *given):
            super().__init__(*given)
            self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
            self.fc1, self.fc2 = nn.Linear(16 * 12 * 12, 32), nn.Linear(32, 10)

    mnist_fsdp.Net = Narrow


def small_gpt():
    """From now on, the smallest GPT has one block of its four, a quarter of its width, and is hardly validated."""
    import gpt_fsdp
    from planner.models import shapes

    one_block = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 1}
    shapes.GPT_SHAPES["tiny"] = dataclasses.replace(shapes.GPT_SHAPES["tiny"], **one_block)
    gpt_fsdp.VALIDATION_SEQUENCES = 4


if __name__ == "__main__":
    sys.path.insert(0, str(SOURCE))
    count, name = int(sys.argv[1]), sys.argv[2]
    sys.argv = [f"{name}.py", *sys.argv[3:]]
    from labkit.measuring import meters
    from labkit.running import options, ranks

    meters.TRACED_STEPS = range(0)
    keep(count)
    narrow()
    small_gpt()
    lab = importlib.import_module(name)
    ranks.run(lab.main, options.parse(lab.Config, lab.__doc__))
