"""Metrics. Each makes a vector of numbers of an item and one value of the sum of such vectors.

So a mean, a corpus BLEU, a macro F1 and a perplexity are resampled in one way (`statistics.py`), from what the result
file holds.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from typing import Any, no_type_check

import numpy as np

from jaxserve.extras import optional
from jaxserve.validation import require


@dataclass(frozen=True)
class Answered:
    """What an item's metrics look at; what a kind does not have is left as it is.

    prediction: the answer that was found in the generated text, the best label, or None.
    target: the right answer.
    values: the data line.
    best: `multiple_choice` and `classification`: the index of the best answer by "sum", "per_byte", "per_token".
    right: the index of the right answer.
    logprob, tokens: `perplexity`: of all tokens but the first, natural logarithm; words, bytes: of the whole text.
    """

    prediction: str | None = None
    target: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    best: Mapping[str, int] = field(default_factory=dict)
    right: int = -1
    logprob: float = 0.0
    tokens: int = 0
    words: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Metric:
    """`vector(answered)` of an item; the values of sums of vectors, shape [..., k] to [...], are `total_of(name)`."""

    name: str
    vector: Callable[[Answered], Sequence[float]]


def mean_of(sums: np.ndarray) -> np.ndarray:
    """The mean of items with the vectors (value, 1)."""
    return np.asarray(sums[..., 0] / sums[..., 1])


# ---- texts ------------------------------------------------------------------------------------------------


def normalised(text: str) -> str:
    """As SQuAD compares answers: lower case, without punctuation, articles and repeated white space."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1_of_words(prediction: str, target: str) -> float:
    """The harmonic mean of precision and recall of words, as SQuAD has it."""
    found, wanted = normalised(prediction).split(), normalised(target).split()
    if not found or not wanted:
        return float(found == wanted)
    same = sum((Counter(found) & Counter(wanted)).values())
    return 2 * same / (len(found) + len(wanted))


_TEXT_SCORES: dict[str, Callable[[str, str], float]] = {
    "accuracy": lambda prediction, target: prediction.strip() == target.strip(),
    "exact_match": lambda prediction, target: normalised(prediction) == normalised(target),
    "f1": f1_of_words,
    "contains": lambda prediction, target: normalised(target) != "" and normalised(target) in normalised(prediction),
}


@cache
def _rouge(name: str):
    return optional("rouge_score.rouge_scorer", "evaluation", f"metrics: {name!r}").RougeScorer([name], True)


def _rouge_score(name: str, prediction: str, target: str) -> float:
    return _rouge(name).score(target, prediction)[name].fmeasure


def _text_vector(score: Callable[[str, str], float], answered: Answered) -> tuple[float, float]:
    found = answered.prediction
    return (0.0 if found is None else float(score(found, answered.target)), 1.0)


@cache
def _bleu():
    return optional("sacrebleu", "evaluation", "metrics: 'bleu'").BLEU(effective_order=False)


def _bleu_vector(answered: Answered) -> list[float]:
    """Lengths, matching n-grams and all n-grams: what a corpus BLEU sums up."""
    found = _bleu().corpus_score([answered.prediction or ""], [[answered.target]])
    return [float(value) for value in (found.sys_len, found.ref_len, *found.counts, *found.totals)]


def _bleu_total(sums: np.ndarray) -> np.ndarray:
    bleu = optional("sacrebleu", "evaluation", "metrics: 'bleu'").BLEU
    flat = sums.reshape(-1, sums.shape[-1]).astype(int)
    values = [
        bleu.compute_bleu(
            correct=row[2:6].tolist(), total=row[6:].tolist(), sys_len=int(row[0]), ref_len=int(row[1])
        ).score
        for row in flat
    ]
    return np.array(values).reshape(sums.shape[:-1])


# ---- choices ----------------------------------------------------------------------------------------------


def _choice_vector(by: str, answered: Answered) -> tuple[float, float]:
    return (float(answered.best[by] == answered.right), 1.0)


def _confusion(labels: Sequence[str], answered: Answered) -> list[float]:
    """One in the cell of (right label, predicted label)."""
    cells = np.zeros((len(labels), len(labels)))
    cells[answered.right, answered.best["sum"]] = 1
    return cells.ravel().tolist()


def macro_f1(sums: np.ndarray) -> np.ndarray:
    """The mean of the labels' F1, from confusion counts; a label that occurs nowhere counts as 0."""
    size = round(sums.shape[-1] ** 0.5)
    cells = sums.reshape(*sums.shape[:-1], size, size)
    hits = np.diagonal(cells, axis1=-2, axis2=-1)
    both = cells.sum(-1) + cells.sum(-2)
    return np.asarray(np.where(both > 0, 2 * hits / np.maximum(both, 1), 0.0).mean(-1))


# ---- perplexity -------------------------------------------------------------------------------------------


def _rate_vector(unit: str, answered: Answered) -> tuple[float, float]:
    return (answered.logprob, float(getattr(answered, unit)))


def _perplexity(sums: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-mean_of(sums)))


def _bits(sums: np.ndarray) -> np.ndarray:
    return np.asarray(-mean_of(sums) / np.log(2))


# ---- by name ----------------------------------------------------------------------------------------------

_VECTORS: dict[str, Callable[[Answered], Sequence[float]]] = {
    **{name: partial(_text_vector, score) for name, score in _TEXT_SCORES.items()},
    **{n: partial(_text_vector, partial(_rouge_score, n)) for n in ("rouge1", "rouge2", "rougeL")},
    "bleu": _bleu_vector,
    "accuracy_per_byte": partial(_choice_vector, "per_byte"),
    "accuracy_per_token": partial(_choice_vector, "per_token"),
    "perplexity": partial(_rate_vector, "tokens"),
    "word_perplexity": partial(_rate_vector, "words"),
    "byte_perplexity": partial(_rate_vector, "bytes"),
    "bits_per_byte": partial(_rate_vector, "bytes"),
}
_BY_CHOICE = ("accuracy", "accuracy_per_byte", "accuracy_per_token")
METRICS_OF_KIND = {
    "generate": ("exact_match", "accuracy", "f1", "contains", "rouge1", "rouge2", "rougeL", "bleu"),
    "multiple_choice": _BY_CHOICE,
    "classification": (*_BY_CHOICE, "macro_f1"),
    "perplexity": ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"),
}
_TOTALS = {
    "bleu": _bleu_total,
    "macro_f1": macro_f1,
    **dict.fromkeys(("perplexity", "word_perplexity", "byte_perplexity"), _perplexity),
    "bits_per_byte": _bits,
}
LOWER_IS_BETTER = frozenset(METRICS_OF_KIND["perplexity"])


def total_of(name: str) -> Callable[[np.ndarray], np.ndarray]:
    """From sums of a metric's vectors to its values."""
    return _TOTALS.get(name, mean_of)


@no_type_check
def metric_of(given: str | Mapping[str, Any], kind: str, labels: Sequence[str] | None = None) -> Metric:
    """A kind's metric of this name, or {function: "module:name", name: what it is called}; ValueError for others.

    A function gets the prediction (None where none was found), the target and the data line, and returns a number.
    """
    if isinstance(given, Mapping):
        return _own_metric(given)
    known = METRICS_OF_KIND[kind]
    require(given in known, "metrics", given, f"a function or one of {', '.join(known)} for kind={kind!r}")
    if kind != "generate" and given == "accuracy":
        return Metric(given, partial(_choice_vector, "sum"))
    if given == "macro_f1":
        return Metric(given, partial(_confusion, labels or ()))
    if given.startswith("rouge"):
        _rouge(given)
    if given == "bleu":
        _bleu()
    return Metric(given, _VECTORS[given])


def _own_metric(given: Mapping[str, Any]) -> Metric:
    path = given.get("function")
    valid = isinstance(path, str) and path.count(":") == 1 and given.keys() <= {"function", "name"}
    require(valid, "metrics", dict(given), "a name, or {function: 'module:name', name: ...}")
    module, _, name = path.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"metrics: function {path!r}: {error}") from None
    called = given.get("name") or name
    require(called not in _TOTALS, "metrics", called, "a name that no metric here has")

    def vector(answered: Answered) -> tuple[float, float]:
        value = function(answered.prediction, answered.target, dict(answered.values))
        return (float(value), 1.0)

    return Metric(called, vector)
