"""The records that the documents' numbers come from."""

from pathlib import Path

import pytest

from ttnorm.bench.records import SCORES, read_records

FILES = sorted((Path(__file__).parents[2] / "results").glob("*.jsonl"))
FIELDS = {
    *("dataset", "severity", "domain", "scenario", "norm", "method", "batch_size", "seed", "n"),
    *("seconds", "model", "alpha", "config", "versions", "device", "experiment"),
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_record_says_what_was_measured_and_how(file):
    for record in read_records([file]):
        assert record.keys() >= FIELDS
        assert record.keys() & SCORES
        assert record["experiment"]


def test_every_data_set_has_records():
    assert {file.stem for file in FILES} >= {"cifar10-c", "cifar100-c", "imagenet-c", "camvid"}
