"""Draw the pictures of README.md from committed records, and write its table: python images/readme.py"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

import ladder  # noqa: E402
from labkit.teaching import plots  # noqa: E402

REFERENCE = ROOT / "source_code" / "results" / "reference" / "ladder-amd-epyc-2-cores"


def with_table(readme: str) -> str:
    """README's text with the table made from the records."""
    table = ladder.as_markdown(ladder.memory_table(ladder.read(REFERENCE)))
    return re.sub(r"(<!-- table: memory -->\n).*(<!-- end -->)", rf"\1{table}\n\2", readme, flags=re.DOTALL)


if __name__ == "__main__":
    plots.ladder(ladder.read(REFERENCE), ROOT / "images" / "ladder.png")
    path = ROOT / "README.md"
    path.write_text(with_table(path.read_text()))
