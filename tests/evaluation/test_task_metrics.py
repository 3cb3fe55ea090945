"""Metrics against their definitions and against libraries that have them; post-processing."""

import math

import numpy as np
import pytest
import sacrebleu
from rouge_score import rouge_scorer
from sklearn.metrics import f1_score

from jaxserve.evaluation.metrics import METRICS_OF_KIND, Answered, metric_of, total_of
from jaxserve.evaluation.postprocess import Postprocess

PAIRS = [
    ("The cat sat on the mat.", "the cat sat on a mat"),
    ("a dog", "The dog barked at the cat"),
    ("nothing alike", "wholly different words"),
    ("It was the best of times, it was the worst of times", "it was the best of times it was the worst of days"),
]


def value(name, answered, kind="generate", labels=None):
    """The metric of all items, from their vectors alone."""
    metric = metric_of(name, kind, labels)
    return float(total_of(name)(np.sum([metric.vector(a) for a in answered], 0)))


@pytest.mark.parametrize(
    ("name", "prediction", "target", "expected"),
    [
        ("accuracy", " 12 ", "12", 1),
        ("accuracy", "Twelve", "twelve", 0),
        ("accuracy", None, "", 0),
        ("exact_match", "The  Eiffel tower!", "eiffel tower", 1),
        ("exact_match", "eiffel towers", "eiffel tower", 0),
        ("contains", "I would say it is Paris, France.", "paris", 1),
        ("exact_match", "1,200 in the U.S.", "1200 in US", 1),
        ("contains", "Rome", "Paris", 0),
        ("contains", "Rome", "A", 0),  # an article: nothing is left of it
        ("f1", "the red big car", "a big car", 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("f1", "", "a word", 0),
        ("f1", "same same", "same", 2 * 0.5 / 1.5),
    ],
)
def test_of_one_text(name, prediction, target, expected):
    assert value(name, [Answered(prediction, target)]) == pytest.approx(expected)


def test_a_mean_is_that_of_the_items():
    answered = [Answered(p, "1") for p in ("1", "2", "1", None)]
    assert value("accuracy", answered) == 0.5


@pytest.mark.parametrize("name", ["rouge1", "rouge2", "rougeL"])
def test_rouge_is_its_librarys(name):
    scorer = rouge_scorer.RougeScorer([name], use_stemmer=True)
    expected = np.mean([scorer.score(target, prediction)[name].fmeasure for prediction, target in PAIRS])
    assert value(name, [Answered(*pair) for pair in PAIRS]) == pytest.approx(expected)


def test_bleu_of_a_corpus_is_the_librarys():
    expected = sacrebleu.corpus_bleu([p for p, _ in PAIRS], [[t for _, t in PAIRS]]).score
    assert 10 < expected < 90
    assert value("bleu", [Answered(*pair) for pair in PAIRS]) == pytest.approx(expected)


def test_choices_by_sum_byte_and_token():
    answered = [Answered(best={"sum": 0, "per_byte": 1, "per_token": 2}, right=right) for right in (0, 1, 1, 2)]
    names = METRICS_OF_KIND["multiple_choice"]
    assert [value(name, answered, "multiple_choice") for name in names] == [0.25, 0.5, 0.25]


def test_macro_f1_is_scikit_learns():
    random = np.random.default_rng(0)
    right, found = random.integers(0, 3, 40), random.integers(0, 3, 40)
    answered = [Answered(best={"sum": int(f)}, right=int(r)) for r, f in zip(right, found, strict=True)]
    expected = f1_score(right, found, average="macro")
    assert value("macro_f1", answered, "classification", ("a", "b", "c")) == pytest.approx(expected)


def test_perplexities_by_definition():
    answered = [
        Answered(logprob=-20.0, tokens=8, words=4, bytes=30),
        Answered(logprob=-10.0, tokens=2, words=1, bytes=5),
    ]
    found = [value(name, answered, "perplexity") for name in METRICS_OF_KIND["perplexity"]]
    assert found == pytest.approx([math.exp(30 / 10), math.exp(30 / 5), math.exp(30 / 35), 30 / 35 / math.log(2)])


@pytest.mark.parametrize(
    ("given", "text", "expected"),
    [
        (None, "  a text \n", "a text"),
        ("number", "First 3, then $1,200.50.", "1200.5"),
        ("number", "it is -07.0 degrees", "-7"),
        ("number", "version v2 has no number", None),
        ({"number": None, "take": "first"}, "First 3, then 4", "3"),
        ({"regex": r"is (\w+)"}, "it is red and is blue", "red"),
        ({"regex": r"is (\w+)", "take": "last"}, "it is red and is blue", "blue"),
        ({"regex": r"\d+"}, "none", None),
        ("choice", "A good question. The answer is (C), not B.", "C"),
        ("choice", "Answer: B", "B"),
        ("choice", "I think (D) because A is wrong", "D"),
        ({"choice": "AB"}, "C", None),
        ("json", 'Sure: {"a": {"b": [1, "x"]}} done', '{"a": {"b": [1, "x"]}}'),
        ({"json": "a.b.1"}, '```json\n{"a": {"b": [1, "x"]}}\n```', "x"),
        ({"json": "a.c"}, '{"a": {"b": 1}}', None),
        ({"json": "a"}, "{not json} {'a': 1}", None),
    ],
)
def test_finding_the_answer(given, text, expected):
    assert Postprocess.parse(given).apply(text) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("numbers", "postprocess='numbers': postprocess must be one of"),
        ({"regex": "("}, r"postprocess: regex='\('"),
        ({"regex": "a", "number": None}, "postprocess=.*must be a kind"),
        ({"choice": ""}, "postprocess.choice"),
        ({"number": None, "take": "second"}, "postprocess.take='second'"),
    ],
)
def test_wrong_post_processing(given, message):
    with pytest.raises(ValueError, match=message):
        Postprocess.parse(given)
