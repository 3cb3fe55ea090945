"""Training a draft head: it learns, what it learned is accepted more often, and an interruption changes nothing."""

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_tools import SHAPES, write_tiny_checkpoint
from cli_tools import flags
from engine_tools import run, tiny_decoder, tiny_engine
from flax import nnx

from jaxserve import Engine, SamplingParams
from jaxserve.checkpoint.draft_head import load_head, read_head, save_head
from jaxserve.checkpoint.hugging_face import read_config
from jaxserve.cli import main
from jaxserve.draft_training import corpus, trainer
from jaxserve.draft_training.options import TrainingOptions
from jaxserve.draft_training.prompts import SYSTEMS, own_prompts
from jaxserve.draft_training.report import plot
from jaxserve.draft_training.trainer import train
from jaxserve.models.decoder import Decoder


@cache
def target() -> Decoder:
    """Its layers add nothing, and every token has one likeliest successor: what a head can learn in a few steps."""
    model = nnx.clone(tiny_decoder(num_hidden_layers=1, tie_word_embeddings=False))
    for matrix in (model.layers[0].out, model.layers[0].down):
        matrix[...] = jnp.zeros_like(matrix[...])
    successors = np.random.default_rng(0).permutation(300)
    model.head[...] = model.head[...].at[:, successors].set(model.embed[...].T)
    return model


OPTIONS = TrainingOptions(draft_vocab=150, epochs=5, batch_size=16, learning_rate=1e-2)
SHARDS = 3
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 16}
PROMPTS = [[index % 20 + 10, 20, 30 + index % 7] for index in range(140)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    with tiny_engine(decoder=target(), **SMALL) as engine:
        seen = []
        corpus.write_corpus(engine, target(), PROMPTS, folder, length=24, report=seen.append)
        assert seen == [64, 64, 12]
        [file] = folder.glob("*-00001.npz")
        before = file.stat().st_mtime_ns
        corpus.write_corpus(engine, target(), PROMPTS, folder, length=24)
        assert file.stat().st_mtime_ns == before, "what is there is not done again"
        for others, length in (([[1, 2, 3]] * 140, 24), (PROMPTS, 25), (PROMPTS[:64] + PROMPTS[:64], 24)):
            with pytest.raises(ValueError, match="other prompts or has another length"):
                corpus.write_corpus(engine, target(), others, folder, length=length)
    return folder


@pytest.fixture(scope="module")
def trained(answers, tmp_path_factory):
    return train(target(), answers, SHARDS, OPTIONS, tmp_path_factory.mktemp("trained"))


def parameters(head) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(head))]


def test_the_corpus_is_what_the_target_says(answers):
    shards = [corpus.read_shard(answers, index) for index in range(SHARDS)]
    assert [len(shard.tokens) for shard in shards] == [64, 64, 12]
    shard, row = shards[1], 4
    length, start = shard.lengths[row], shard.starts[row]
    tokens = shard.tokens[row, :length]
    assert tokens[:start].tolist() == PROMPTS[64 + row]
    hidden = target()(jnp.asarray(tokens), jnp.arange(length, dtype=jnp.int32))
    np.testing.assert_allclose(
        np.asarray(hidden, np.float32), shard.hidden[row, :length].astype(np.float32), atol=0.1, rtol=0.02
    )
    greedy = np.asarray(target().logits(hidden)).argmax(-1)[start - 1 : length - 1]
    assert (greedy == tokens[start:]).mean() > 0.9  # rows of even number are greedy


def test_it_learns(trained, answers, tmp_path):
    assert len(trained.losses) == 5 * 8
    assert np.mean(trained.losses[-5:]) < 0.7 * trained.losses[0]
    assert trained.accuracy[-1][0] > trained.accuracy[0][0]
    plot(trained, tmp_path / "curve.svg")
    assert "share of drafts that are right" in (tmp_path / "curve.svg").read_text()


def test_an_interruption_changes_nothing(trained, answers, tmp_path, monkeypatch):
    """And each step is done once, those of the last quarter of the epochs three drafts deep."""
    depths, update = [], trainer._update

    def noting(graph, options, steps, depth, *rest):
        depths.append(depth)
        return update(graph, options, steps, depth, *rest)

    monkeypatch.setattr(trainer, "_update", noting)
    for stop in (5, 8, 27, None):
        again = train(target(), answers, SHARDS, OPTIONS, tmp_path, stop_after=stop)
    assert depths == [1] * 24 + [3] * 16
    assert again.losses == trained.losses
    assert again.accuracy == trained.accuracy
    for one, other in zip(parameters(trained.head), parameters(again.head), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="other options"):
        train(target(), answers, SHARDS, TrainingOptions(), tmp_path)


@pytest.mark.slow
def test_drafts_of_a_trained_head_are_accepted_more_often(trained, answers, tmp_path):
    untrained = train(target(), answers, SHARDS, OPTIONS, tmp_path / "untrained", stop_after=1)
    rates = []
    for index, head in enumerate((untrained.head, trained.head)):
        save_head(head, tmp_path / str(index))
        speculative = {"method": "eagle", "model": str(tmp_path / str(index)), "length_control": "fixed"}
        speculative |= {"num_speculative_tokens": 3}
        with tiny_engine(decoder=target(), speculative_config=speculative, **SMALL) as engine:
            params = SamplingParams(temperature=0, max_tokens=20)
            run(engine, [(prompt, params) for prompt in PROMPTS[128:]])
            stats = engine.stats()
            rates.append(stats["spec_num_accepted_tokens"] / stats["spec_num_drafts"])
    assert rates[1] > rates[0] + 0.5


def test_int8_is_what_is_written(trained, tmp_path):
    save_head(trained.head, tmp_path)
    config = read_head(tmp_path, "eagle", target().config)
    assert config == trained.head.config
    size = sum(leaf.size for leaf in parameters(trained.head))
    assert (tmp_path / "model.safetensors").stat().st_size < 1.5 * size
    for old, new in zip(parameters(trained.head), parameters(load_head(tmp_path, config, np.float32)), strict=True):
        assert np.abs(old.astype(np.float64) - new).max() <= np.abs(old).max() / 250


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    with Engine(model=str(write_tiny_checkpoint(tmp_path_factory.mktemp("talker"))), **SHAPES) as engine:
        yield engine
        engine.check_integrity()


def test_the_model_writes_prompts_in_the_place_of_the_user(talker, tmp_path):
    """As another request for the same continuation would have it, and the same whatever interrupted it."""
    whole, resumed, count = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl", 2 * len(SYSTEMS) + 3
    told = []
    own_prompts(talker, count, whole, seed=5, max_tokens=6, report=told.append)
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    texts = [line["messages"][0]["content"] for line in lines]
    assert len(set(texts)) == count == sum(told)
    assert [line["messages"][0]["role"] for line in lines] == ["user"] * count
    for line, text in list(zip(lines, texts, strict=True))[: len(SYSTEMS)]:
        system = SYSTEMS[line["number"] % len(SYSTEMS)]
        before = "" if system is None else f"<system>{system}\n"
        params = SamplingParams(temperature=0.9, top_p=0.95, seed=(5 << 32) + line["number"], max_tokens=6)
        [answer] = run(talker, [(before + "<user>", params)])
        assert answer.outputs[0].text.strip() == text
    cut = whole.read_text().index("\n", 900)
    resumed.write_text(whole.read_text()[: cut + 9])
    told.clear()
    own_prompts(talker, count, resumed, seed=5, max_tokens=6, report=told.append)
    assert resumed.read_text() == whole.read_text()
    assert told[0] > 0
    assert sum(told) == count
    with pytest.raises(ValueError, match="prompts of seed 5, not 6: name another folder"):
        own_prompts(talker, count, resumed, seed=6, max_tokens=6)
    own_prompts(talker, count, tmp_path / "other.jsonl", seed=6, max_tokens=6)
    assert (tmp_path / "other.jsonl").read_text() != whole.read_text()


def test_prompts_that_cannot_be_written(talker, tmp_path):
    with pytest.raises(ValueError, match=r"^num_prompts=130: must be fewer, the model wrote \d+ of"):
        own_prompts(talker, 130, tmp_path / "few.jsonl", max_tokens=1)  # of 128 tokens
    with tiny_engine(decoder=target(), **SMALL) as engine, pytest.raises(ValueError, match="has none"):
        own_prompts(engine, 8, tmp_path / "none.jsonl")
    with Engine(model=str(write_tiny_checkpoint(tmp_path)), **SHAPES) as engine:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages | length }}"}))
        with pytest.raises(ValueError, match=r"^prompts: this model's chat template changes what a user says"):
            own_prompts(engine, 8, tmp_path / "changed.jsonl")


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    """What a second call finds there it only reads."""
    folder, prompts = write_tiny_checkpoint(tmp_path / "model"), tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": "ab" * (index + 1)}) for index in range(8)))
    command = ["train-draft", *flags(folder)[: 2 * (1 + len(SHAPES))], "--output_dir", str(tmp_path / "out")]
    command += ["--prompts", str(prompts), "--num_prompts", "8", "--length", "16", "--epochs", "1"]
    command += ["--draft_vocab", "50"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert main(command) == 0
    assert capsys.readouterr().out == printed
    assert read_head(tmp_path / "out" / "head", "eagle", read_config(folder)).draft_vocab == 50
