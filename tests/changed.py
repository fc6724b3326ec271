# SPDX-License-Identifier: BSD-3-Clause
"""Print what must be tested of the chapters that were changed since the last push: their notebooks and their tests.

A chapter is changed with its notebook, its exercises, its diagrams or its tests.
"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OF_A_CHAPTER = re.compile(r"notebooks/(\d\d)_|chapter_(\d\d)\.py$")


def git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()


def main():
    (since,) = git("rev-parse", "--verify", "--quiet", "@{upstream}") or ["HEAD"]
    files = git("diff", "--name-only", since) + git("ls-files", "--others", "--exclude-standard")
    chapters = sorted({a or b for file in files for a, b in OF_A_CHAPTER.findall(file)})
    for chapter in chapters:
        for path in [*ROOT.glob(f"notebooks/{chapter}_*.ipynb"), *ROOT.glob(f"tests/test_chapter_{chapter}.py")]:
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
