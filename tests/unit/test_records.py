"""Records survive a kill, are never doubled, and other people's files are left alone."""

import json

import pytest

from ttnorm.bench.records import RecordFile, read_records


def test_what_was_written_is_read(tmp_path):
    file = RecordFile(tmp_path / "r.jsonl")
    file.append({"norm": "ttn", "wrong": 3})
    file.append({"norm": "tbn", "wrong": 4})
    assert read_records([tmp_path]) == [{"norm": "ttn", "wrong": 3}, {"norm": "tbn", "wrong": 4}]


def test_a_cell_is_what_was_run_not_what_came_out(tmp_path):
    file = RecordFile(tmp_path / "r.jsonl")
    file.append({"norm": "ttn", "wrong": 3, "seconds": 1.0, "device": "a", "versions": {}})
    assert {"norm": "ttn", "wrong": 5, "seconds": 2.0} in file
    assert {"norm": "ttn", "config": {}} not in file
    with pytest.raises(ValueError, match="already holds this cell"):
        file.append({"norm": "ttn", "wrong": 4})


@pytest.mark.parametrize("cut", range(1, 28, 3))
def test_a_torn_last_line_is_cut_off(tmp_path, cut):
    path = tmp_path / "r.jsonl"
    for norm in ("ttn", "tbn"):
        RecordFile(path).append({"norm": norm, "wrong": 3})
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    file = RecordFile(path)
    assert {"norm": "ttn"} in file
    assert {"norm": "tbn"} not in file
    file.append({"norm": "tbn", "wrong": 3})
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", ["my notes", "my notes\n", '{"a": 1}\nmy notes', "[1]\n"])
def test_a_file_of_something_else_is_refused_and_untouched(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"no.* record"):
        RecordFile(path)
    assert path.read_text() == content


def test_errors_say_where(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"a": 1}) + "\noops\n")
    with pytest.raises(ValueError, match=r"r.jsonl, line 2 is no record"):
        read_records([path])
    with pytest.raises(FileNotFoundError, match="There is no file"):
        read_records([tmp_path / "none.jsonl"])
