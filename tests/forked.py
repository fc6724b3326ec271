# SPDX-License-Identifier: BSD-3-Clause
"""Call a function in a process of its own that need not import torch first: it is forked from the tests' fork server."""

import os
import pickle
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "source_code"


def by_value(function):
    """The function, which from now on travels whole: other processes cannot import a test file."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    return function


def forked(function, *arguments, env=os.environ, timeout: float = 120):
    """What ``function(*arguments)`` returns. AssertionError, with its traceback, if it raises."""
    import cloudpickle
    from commands import script

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "call").write_bytes(cloudpickle.dumps((by_value(function), arguments)))
        run = script(__file__, folder, env=env, timeout=timeout)
        assert run.returncode == 0, run.stdout + run.stderr
        return pickle.loads((Path(folder) / "returned").read_bytes())


if __name__ == "__main__":
    sys.path.insert(0, str(SOURCE))
    os.environ["MPLBACKEND"] = "Agg"
    folder = Path(sys.argv[1])
    function, arguments = pickle.loads((folder / "call").read_bytes())
    (folder / "returned").write_bytes(pickle.dumps(function(*arguments)))
