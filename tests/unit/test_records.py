"""Records survive a kill, are never doubled, and other people's files are left alone."""

import json

import pytest

from ttnorm.bench.records import FIELDS, RecordFile, read_records
from ttnorm.bench.shards import merge


def record(norm="ttn", **values):
    fields = {name: kind() for name, kind in FIELDS.items()}
    fields |= {"model": {"name": "net"}, "config": {"subset": 10}}
    return fields | {"norm": norm, "n": 10, "wrong": 0} | values


def test_what_was_written_is_read(tmp_path):
    file, records = RecordFile(tmp_path / "r.jsonl"), [record("ttn", wrong=3), record("tbn")]
    for each in records:
        file.append(each)
    assert read_records([tmp_path]) == records


def test_a_cell_is_what_was_run_not_what_came_out(tmp_path):
    file = RecordFile(tmp_path / "r.jsonl")
    file.append(record(wrong=3, seconds=1.0, device="a", versions={}))
    assert record(wrong=5, seconds=2.0) in file
    assert record(config={"subset": 1}) not in file
    with pytest.raises(ValueError, match="already holds this cell"):
        file.append(record(wrong=4))


def test_how_alpha_was_fitted_is_no_part_of_a_cell(tmp_path):
    """Its fingerprint says as much, and records from before do not tell."""
    alpha = {"name": "net.ttn.safetensors", "fingerprint": "0123"}
    old, new = record(alpha=alpha), record(alpha=alpha | {"config": {"lr": 0.001}})
    for name, each in (("a", old), ("b", new)):
        file = RecordFile(tmp_path / f"{name}.jsonl")
        file.append(each)
        assert old in file
        assert new in file
    assert read_records([tmp_path]) == [old]
    assert record(alpha=alpha | {"fingerprint": "4567"}) not in file
    assert record(alpha=None) not in file


@pytest.mark.parametrize("cut", [1, 2, 3, 20, 60, 100])
def test_a_torn_last_line_is_cut_off(tmp_path, cut):
    path = tmp_path / "r.jsonl"
    for norm in ("ttn", "tbn"):
        RecordFile(path).append(record(norm))
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    file = RecordFile(path)
    assert record("ttn") in file
    assert record("tbn") not in file
    file.append(record("tbn"))
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "content",
    ["my notes", "my notes\n", '{"a": 1}\nmy notes', "[1]\n", '{"a": 1}', '{"a": 1}\n', "{'a': 1}"],
)
def test_a_file_of_something_else_is_refused_and_untouched(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"no.* record"):
        RecordFile(path)
    assert path.read_text() == content


def test_what_a_killed_run_left_is_read_up_to_its_torn_line(tmp_path, caplog):
    path = tmp_path / "r.jsonl"
    content = json.dumps(record("ttn")) + "\n" + json.dumps(record("tbn"))
    path.write_text(content[:-20])
    assert read_records([tmp_path]) == [record("ttn")]
    assert "r.jsonl ends in the middle of a record" in caplog.text
    assert path.read_text() == content[:-20]
    path.write_text(content)  # an editor may leave out the last end of a line
    assert read_records([tmp_path]) == [record("ttn"), record("tbn")]


def test_errors_say_where(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(record()) + "\noops\n")
    with pytest.raises(ValueError, match=r"r.jsonl, line 2 is no record"):
        read_records([path])
    with pytest.raises(FileNotFoundError, match="There is no file"):
        read_records([tmp_path / "none.jsonl"])


def test_two_processes_with_one_file_double_nothing(tmp_path):
    first, second = (RecordFile(tmp_path / "r.jsonl") for _ in range(2))
    first.append(record("ttn", wrong=3))
    second.append(record("tbn"))
    second.append(record("ttn", wrong=3))  # which it began before the first had it
    assert record("tbn") not in first
    first.append(record("tbn"))
    assert [r["norm"] for r in read_records([tmp_path])] == ["ttn", "tbn"]
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 2


def test_a_cell_of_two_files_counts_once(tmp_path):
    for name in ("a", "b"):
        RecordFile(tmp_path / f"{name}.jsonl").append(record("ttn"))
    assert len(read_records([tmp_path])) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"config": None},
        {"config": {}},
        {"model": {}},
        {"severity": "5"},
        {"n": 0},
        {"norm": ["ttn"]},
        {"wrong": "7"},
    ],
)
def test_a_line_with_something_else_in_a_field_is_named(tmp_path, change):
    (tmp_path / "r.jsonl").write_text(json.dumps(record(**change)) + "\n")
    with pytest.raises(ValueError, match=r"r\.jsonl, line 1 is no record of an evaluation"):
        read_records([tmp_path])


def test_only_parts_of_that_very_file_are_merged(tmp_path):
    path = tmp_path / "r[1].jsonl"
    for name, norm in (("r[1].jsonl.rank0", "ttn"), ("r[1].jsonl.rank12", "tbn")):
        RecordFile(tmp_path / name).append(record(norm))
    RecordFile(tmp_path / "r[1].jsonl.rank0.bak").append(record("source"))
    merge(path)
    assert [r["norm"] for r in read_records([path])] == ["ttn", "tbn"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r[1].jsonl", "r[1].jsonl.rank0.bak"]
