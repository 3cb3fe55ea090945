"""`jaxserve bench speculative` on a tiny model: its cells, its journal, and that it measures what it says."""

import json

import pytest
from engine_tools import tiny_engine

from jaxserve.bench import speculative as bench
from jaxserve.cli import main


@pytest.fixture(scope="module")
def engines():
    speculation = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3, "length_control": "fixed"}
    sizes = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    with tiny_engine(**sizes) as without, tiny_engine(speculative_config=speculation, **sizes) as with_:
        yield bench.Engines(without, with_)


def test_a_cell_is_measured_once_and_counts_the_drafts(engines, tmp_path):
    prompts = {"repeats": [[10, 11, 12] * 8 + [index] for index in range(9, 13)]}
    journal, seen = tmp_path / "cells.jsonl", []
    cells = bench.run_cells(engines, prompts, [2, 4], journal, seen.append)
    assert [(cell.group, cell.concurrency, cell.prompts) for cell in cells] == [("repeats", 2, 2), ("repeats", 4, 4)]
    for cell in cells:
        assert len(cell.seconds_with) == len(cell.seconds_without) == bench.PAIRS
        assert cell.output_tokens == cell.prompts * bench.OUTPUT_TOKENS
        assert 0 < cell.accepted_tokens == sum(cell.accepted_at) < cell.draft_tokens
        assert [float(share) for share in cell.row()[-1].split()] == pytest.approx(
            [accepted / cell.drafts for accepted in cell.accepted_at], abs=0.005
        )
        assert cell.mean_accepted_length == 1 + cell.accepted_tokens / cell.drafts
    assert [json.loads(line)["concurrency"] for line in journal.read_text().splitlines()] == [2, 4]

    again = bench.run_cells(engines, {"repeats": prompts["repeats"], "more": [[5, 6, 7]]}, [2, 4], journal, seen.append)
    assert again[:2] == cells, "what the journal knows is not measured again"
    assert len(again) == 4
    assert len(seen) == 6
    assert engines.without.stats()["steps"] > sum(cell.steps for cell in cells), "the other engine ran, too"
    bench.plot(again, tmp_path / "speedup.svg")
    assert "speed-up in decoding" in (tmp_path / "speedup.svg").read_text()


def test_groups_of_a_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"turns": ["a", "b"], "category": "writing"}, {"turns": ["c"], "category": "rag"}, {"prompt": "d"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert bench.groups_of(file) == {"chat": ["a"], "rag": ["c"], "all": ["d"]}
    file.write_text('{"turns": []}')
    with pytest.raises(ValueError, match="line 1"):
        bench.groups_of(file)


def test_prompts_come_from_all_over_a_group():
    assert bench.spread(list(range(80)), 8) == list(range(0, 80, 10))
    assert bench.spread([1, 2], 8) == [1, 2], "a group that has fewer gives all of them"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "dataset=None"),
        (["--dataset", "{file}"], "speculative_config=None"),
        (["--dataset", "{file}", "--speculative-config.method", "ngram", "--groups", "rap"], "groups='rap'"),
        (["--dataset", "{file}", "--speculative-config.method", "n-gram"], "method='n-gram'"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(arguments, message, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["a"], "category": "rag"}\n')
    given = [argument.format(file=file) for argument in arguments]
    assert main(["bench", "speculative", *given]) != 0
    assert message in capsys.readouterr().err
