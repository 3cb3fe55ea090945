"""Prompts for a target to answer, made from templates: conversation, writing, questions, sums, code, summaries."""

import random
from collections.abc import Iterator, Mapping
from importlib.resources import files

import yaml


def template_prompts(seed: int = 0) -> Iterator[str]:
    """Prompts without end, the same for the same seed."""
    words = yaml.safe_load((files(__package__) / "templates.yaml").read_text(encoding="utf-8"))
    source = random.Random(seed)
    while True:
        for template in source.sample(words["prompt"], len(words["prompt"])):
            yield _fill(template, words, source)


def _fill(template: str, words: Mapping[str, list[str]], source: random.Random) -> str:
    names = "topic", "thing", "name", "goods", "place", "task", "job"
    values = {name + number: source.choice(words[name]) for name in names for number in ("", "2")}
    limits = {"a": (4, 60), "b": (2, 40), "c": (2, 9), "d": (100, 900), "year": (1400, 2000)}
    values |= {name: source.randint(*between) for name, between in limits.items()}
    values["german"] = source.choice(words["german"]).format(**values)
    sentences = words["sentence"]
    start, count = source.randrange(len(sentences)), source.randint(3, 8)
    chosen = [sentences[(start + index) % len(sentences)] for index in range(count)]
    values["text"] = " ".join(sentence.format(**values) for sentence in chosen)
    return template.format(**values)
