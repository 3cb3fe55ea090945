"""The result file: torn lines, foreign lines, order, and one writer at a time."""

import json

import pytest

from jaxserve.evaluation.results import ResultsFile, item_by_identity, read_results

IDENTITIES = [{"item": n, "prompt_sha256": f"p{n}", "settings": "s"} for n in range(4)]


def opened(path, **options):
    return ResultsFile(path, 4, item_by_identity(IDENTITIES), **options)


def line(n):
    return {**IDENTITIES[n], "output": f"tücke {n}\u2028\n"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "below" / "task.jsonl"


def test_lines_are_final_at_once_and_in_order_at_the_end(path):
    file = opened(path)
    for n in (2, 0, 3, 1):
        before = path.read_bytes()
        file.append(n, line(n))
        after = path.read_bytes()
        assert after.startswith(before)
        assert json.loads(after[len(before) :]) == line(n)
    written = path.read_bytes().splitlines(keepends=True)
    file.finish()
    assert path.read_bytes() == b"".join(written[n] for n in (1, 3, 0, 2))
    assert sorted(p.name for p in path.parent.iterdir()) == ["task.jsonl"]
    assert read_results(path) == [line(n) for n in range(4)]
    file.close()


def test_every_torn_file_is_continued(path):
    with_two = opened(path)
    with_two.append(1, line(1))
    with_two.append(3, line(3))
    with_two.close()
    content = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(content) if byte == 10]
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        file = opened(path)
        whole = sum(end <= cut for end in ends)
        assert file.missing == [[0, 1, 2, 3], [0, 2, 3], [0, 2]][whole]
        for n in file.missing:
            file.append(n, line(n))
        file.finish()
        file.close()
        assert read_results(path) == [line(n) for n in range(4)]


def test_a_file_that_was_complete_but_not_in_order_is_put_in_order(path):
    file = opened(path)
    for n in (3, 2, 1, 0):
        file.append(n, line(n))
    file.close()
    again = opened(path)
    assert again.missing == []
    again.finish()
    again.close()
    assert [json.loads(text)["item"] for text in path.read_bytes().splitlines()] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({**IDENTITIES[1], "prompt_sha256": "other"}, "line 2: item 1 is of another prompt"),
        ({**IDENTITIES[1], "settings": "other"}, "line 2: item 1 is of other settings or another model"),
        (IDENTITIES[0], "line 2: item 0 stands twice"),
        ({**IDENTITIES[0], "item": 4}, "line 2: item 4: there are 4 items"),
        ({**IDENTITIES[0], "item": -1}, "line 2: item -1"),
        ({"output": "x"}, "line 2: this is no line of this job's results"),
        ("text", "line 2: this is no line of this job's results"),
    ],
)
def test_lines_of_another_job_are_refused(path, wrong, message):
    path.parent.mkdir()
    content = json.dumps(line(0)) + "\n" + json.dumps(wrong) + "\n"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path}: {message}.*--overwrite"):
        opened(path)
    assert path.read_text() == content


def test_one_writer_at_a_time(path):
    file = opened(path)
    with pytest.raises(ValueError, match="another process is writing it"):
        opened(path)
    with pytest.raises(ValueError, match="another process is writing it"):
        opened(path, overwrite=True)
    file.append(0, IDENTITIES[0])
    file.close()
    opened(path).close()
    assert path.read_text() != ""
    opened(path, overwrite=True).close()
    assert path.read_text() == ""


def test_half_a_surrogate_pair_in_the_data_does_not_break_the_file(path):
    file = opened(path)
    file.append(0, {**IDENTITIES[0], "prompt": "\ud800"})
    file.close()
    assert json.loads(path.read_bytes())["prompt"] == "\ud800"
