"""Records survive a kill, are never doubled, and other people's files are left alone."""

import json

import pytest

from ttnorm.bench.records import FIELDS, RecordFile, read_records


def record(norm="ttn", **values):
    return dict.fromkeys(sorted(FIELDS), 0) | {"norm": norm, "wrong": 0} | values


def test_what_was_written_is_read(tmp_path):
    file, records = RecordFile(tmp_path / "r.jsonl"), [record("ttn", wrong=3), record("tbn")]
    for each in records:
        file.append(each)
    assert read_records([tmp_path]) == records


def test_a_cell_is_what_was_run_not_what_came_out(tmp_path):
    file = RecordFile(tmp_path / "r.jsonl")
    file.append(record(wrong=3, seconds=1.0, device="a", versions={}))
    assert record(wrong=5, seconds=2.0) in file
    assert record(config={}) not in file
    with pytest.raises(ValueError, match="already holds this cell"):
        file.append(record(wrong=4))


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
    "content", ["my notes", "my notes\n", '{"a": 1}\nmy notes', "[1]\n", '{"a": 1}', '{"a": 1}\n']
)
def test_a_file_of_something_else_is_refused_and_untouched(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"no.* record"):
        RecordFile(path)
    assert path.read_text() == content


def test_errors_say_where(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(record()) + "\noops\n")
    with pytest.raises(ValueError, match=r"r.jsonl, line 2 is no record"):
        read_records([path])
    with pytest.raises(FileNotFoundError, match="There is no file"):
        read_records([tmp_path / "none.jsonl"])
