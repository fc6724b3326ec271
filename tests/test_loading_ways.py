# SPDX-License-Identifier: BSD-3-Clause
"""proofs/loading.py sees which ways of loading read the whole model, and its record and the page about it are complete."""

import json

import pytest
import torch
from labkit.measuring.records import RESULTS
from labkit.running import launch
from proofs import loading

(RECORD,) = (RESULTS / "reference").glob("loading-*.json")
ROWS = json.loads(RECORD.read_text())["rows"]
SMALL = loading.SIZES | {"num_hidden_layers": 2, "vocab_size": 8192}  # 56 MiB in fp32
WAYS = {function: name for name, function in loading.WAYS.items()}


def largest(row: dict, name: str) -> int:
    return max(rank[name] for rank in row["by rank"])


def check(row: dict):
    """Check that a way needs what its kind needs: the shard, or the whole model. Tolerances are for pages and code."""
    shard, whole, file = largest(row, "shard"), row["model"], row["file"]
    slack = whole / 10
    assert all(rank["unequal"] == [] for rank in row["by rank"])
    assert sum(rank["shard"] for rank in row["by rank"]) >= whole
    if row["way"] == WAYS[loading.cast_then_shard] and row["stored"] == "bf16":
        assert largest(row, "read") > file - slack and largest(row, "peak") > whole + file - slack
        return
    part = file / row["ranks"]
    assert largest(row, "read") < part + slack and largest(row, "peak") < shard + part + slack
    if row["way"] == WAYS[loading.by_the_library] and row["stored"] == "fp32":  # shards are views of the mapped file
        assert largest(row, "storage") >= whole and largest(row, "anonymous") < slack < shard - slack
    else:
        assert largest(row, "storage") < shard + slack and largest(row, "anonymous") > shard - slack
    assert abs(largest(row, "in use") - shard) < 2 * slack


@pytest.mark.long
@pytest.mark.parametrize("way", [loading.by_the_lab, loading.cast_then_shard])
def test_a_way_reads_and_keeps_what_it_should(way):
    (row,) = loading.run("bf16", (2,), [WAYS[way]], SMALL)
    check(row)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['stored']}-{row['ranks']}-{row['way']}")
def test_the_record_has_the_same_order(row):
    check(row)


def test_the_record_is_of_all_ways_and_on_the_page():
    measured = [(row["stored"], row["ranks"], row["way"]) for row in ROWS]
    assert measured == [(stored, count, way) for stored in loading.DTYPES for count in (2, 4) for way in loading.WAYS]
    assert loading.tables(ROWS) in (launch.SOURCE.parent / "docs" / "loading.md").read_text()


def test_what_is_read_counts_once_it_is_touched(tmp_path):
    """And what comes from the disk counts only where the page cache does not have it."""
    path, size = tmp_path / "file", 2**24
    path.write_bytes(bytes(size))
    mapped = torch.from_file(str(path), size=size, dtype=torch.uint8)
    before, disk = loading.resident()["mapped"], loading.bytes_from_disk()
    with loading.Highest() as highest:
        mapped[: size // 2].sum()
    assert size // 2 <= highest.mapped - before < size
    assert loading.bytes_from_disk() == disk
    del mapped
    assert loading.resident()["mapped"] - before < size // 4
