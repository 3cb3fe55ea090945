"""The same lines from JSONL, CSV, Parquet and a Hugging Face dataset."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from jaxserve.evaluation.config import DataConfig
from jaxserve.evaluation.data import read_rows

ROWS = [{"q": "one, two", "a": "3"}, {"q": 'a "quoted"\nline', "a": ""}, {"q": "tücke", "a": "x"}]


def write(path):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif path.suffix == ".csv":
        lines = ["q,a", '"one, two",3', '"a ""quoted""\nline",', "tücke,x"]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("rows.jsonl", ["line 1", "line 2", "line 3"]),
        ("rows.csv", ["line 2", "line 4", "line 5"]),
        ("rows.parquet", ["row 1", "row 2", "row 3"]),
    ],
)
def test_files(tmp_path, name, places):
    path = tmp_path / name
    write(path)
    rows = read_rows(DataConfig(path=str(path)))
    assert [row.values for row in rows] == ROWS
    assert [row.place for row in rows] == [f"{path}: {place}" for place in places]
    other = path.rename(tmp_path / "data")
    assert [r.values for r in read_rows(DataConfig(path=str(other), format=path.suffix[1:]))] == ROWS
    with pytest.raises(ValueError, match="its format must be named"):
        read_rows(DataConfig(path=str(other)))


@pytest.mark.slow  # importing the library takes seconds
def test_a_dataset_on_disk(tmp_path):
    import datasets

    datasets.DatasetDict({"dev": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    rows = read_rows(DataConfig(dataset=str(tmp_path / "saved"), split="dev"))
    assert [row.values for row in rows] == ROWS
    with pytest.raises(ValueError, match="dataset="):
        read_rows(DataConfig(dataset=str(tmp_path / "saved"), split="none"))


def test_broken_files(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"a\.parquet: no Parquet: "):
        read_rows(DataConfig(path=str(tmp_path / "a.parquet")))
    (tmp_path / "a.csv").write_text('q,a\n"open,1\n')
    with pytest.raises(ValueError, match=r"a\.csv: line 1: no CSV: "):
        read_rows(DataConfig(path=str(tmp_path / "a.csv")))
