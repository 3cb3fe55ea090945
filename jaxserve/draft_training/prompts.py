"""Prompts that the target writes itself: in the place of the user in its chat template it goes on as a user would.

(Magpie, Xu et al. 2024, https://arxiv.org/abs/2406.08464.) So no text has to come from anywhere else, and the answers
are about what the model knows. A system message steers what the user is after.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxserve.engine import Engine
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.chat_template import ChatTemplate

# What assistants are asked for. None is the template's own system message, or none.
SYSTEMS: Sequence[str | None] = (
    None,
    "You are a helpful assistant that answers questions about the world in a few sentences.",
    "You are a helpful assistant that summarizes texts. The user sends an article of several paragraphs.",
    "You are a helpful assistant that solves mathematical word problems step by step.",
    "You are a helpful assistant that translates sentences from German to English.",
    "You are a helpful assistant that answers a question from the passages that the user quotes.",
    None,
    "You are a helpful assistant that writes stories, letters, poems and essays.",
    "You are a helpful assistant that writes and explains computer programs.",
    "You are a helpful assistant that extracts and classifies what the user's text says.",
    "You are a helpful assistant that plays the role that the user gives it.",
    "You are a helpful assistant that reasons about science, history and everyday life.",
)
_AT_ONCE = 256
_PLACE = "@@@"  # a user's text, to find where it stands in a rendered chat


def own_prompts(
    engine: Engine,
    count: int,
    file: Path,
    *,
    seed: int = 0,
    max_tokens: int = 192,
    report: Callable[[int], None] = lambda count: None,
) -> None:
    """Let the engine write `count` different prompts into `file`: JSON lines with `messages`, a number and the seed.

    A prompt is a function of its number and the seed, and ends where the model ends it, or after `max_tokens`. So a
    call goes on behind the last line that is there, and the file is that of a call without interruption. `report`
    hears of prompts done. ValueError if the model's chat template does not show where a user's text stands, if the
    model has nothing new to say, or if the file is of another seed.
    """
    starts = [_user_turn(engine, system) for system in SYSTEMS]
    found = dict(_read(file, seed))
    report(len(found))
    number = max(found.values(), default=-1) + 1
    with file.open("w", encoding="utf-8") as out:
        out.writelines(_line(text, known, seed) for text, known in found.items())
        while len(found) < count:
            if number >= 4 * count:
                raise ValueError(f"num_prompts={count}: must be fewer, the model wrote {len(found)} of {number}")
            numbers = range(number, number + min(_AT_ONCE, count - len(found)))
            number = numbers.stop
            texts = _written(engine, {n: starts[n % len(starts)] for n in numbers}, seed, max_tokens)
            new = {text: n for n, text in zip(numbers, texts, strict=True) if text and text not in found}
            found |= new
            out.writelines(_line(text, n, seed) for text, n in new.items())
            out.flush()
            report(len(new))


def _user_turn(engine: Engine, system: str | None) -> list[int]:
    """A chat up to the user's text."""
    if engine.tokenizer is None:
        raise ValueError("num_prompts: the model writes prompts with a tokenizer, and this engine has none")
    messages = [] if system is None else [{"role": "system", "content": system}]
    text = ChatTemplate(engine.tokenizer).render([*messages, {"role": "user", "content": _PLACE}])
    before, place, _ = text.partition(_PLACE)
    if not place:
        raise ValueError("prompts: this model's chat template changes what a user says: name a file of prompts")
    return engine.tokenizer.encode(before, add_special_tokens=False)


def _written(engine: Engine, turns: dict[int, list[int]], seed: int, max_tokens: int) -> list[str]:
    texts = dict.fromkeys(turns, "")
    for n, turn in turns.items():
        params = SamplingParams(temperature=0.9, top_p=0.95, seed=(seed << 32) + n, max_tokens=max_tokens)
        engine.add_request(str(n), turn, params)
    while engine.has_unfinished():
        for output in engine.step():
            texts[int(output.request_id)] += output.outputs[0].text
    return [text.strip() for text in texts.values()]


def _line(text: str, number: int, seed: int) -> str:
    return json.dumps({"seed": seed, "number": number, "messages": [{"role": "user", "content": text}]}) + "\n"


def _read(file: Path, seed: int) -> Iterator[tuple[str, int]]:
    """Texts and numbers of whole lines."""
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            entry = json.loads(line)
            if entry["seed"] != seed:
                raise ValueError(f"{file}: it holds prompts of seed {entry['seed']}, not {seed}: name another folder")
            yield entry["messages"][0]["content"], entry["number"]
