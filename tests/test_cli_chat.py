"""`jaxserve chat` through pipes: answers on stdout, remarks on stderr."""

import io
import itertools
import re
import signal

import pytest
from checkpoint_tools import SHAPES, write_tiny_checkpoint
from cli_tools import flags, refused, run

from jaxserve import LLM, Engine, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LAST_TURN = re.compile(
    r"^(\d+) prompt tokens, (\d+) of them from the prefix cache; (\d+) output tokens, ", re.MULTILINE
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("chat") / "model")


def user(content):
    return {"role": "user", "content": content}


@pytest.fixture(scope="module")
def said(folder):
    """What the library answers to "Hello", then to "More" with that in front, then to "More" alone; with a system."""
    system = {"role": "system", "content": "Short."}
    with LLM(str(folder), **SHAPES) as llm:
        answer = lambda *messages: llm.chat([system, *messages], PARAMS)[0].outputs[0].text
        first = answer(user("Hello"))
        second = answer(user("Hello"), {"role": "assistant", "content": first}, user("More"))
        return first, second, answer(user("More"))


def talk(capsys, monkeypatch, folder, lines, *arguments):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return run(capsys, "chat", *flags(folder), *arguments)


def test_the_history_is_kept_until_it_is_reset(capsys, monkeypatch, folder, said):
    lines = ["Hello", "", "More", "/reset", "More", "/exit", "never said"]
    status, out, err = talk(capsys, monkeypatch, folder, lines, "--system", "Short.")
    assert (status, out) == (0, "".join(f"{answer}\n" for answer in said))
    assert said[1] != said[2], "this model is too simple for the test"
    assert "the conversation is forgotten" in err


def test_a_later_turn_is_computed_from_its_new_part(capsys, monkeypatch, folder):
    status, _, err = talk(capsys, monkeypatch, folder, ["/stats", "Hello", "/stats", "More", "/stats"])
    assert status == 0
    assert "nothing was said yet" in err
    (first, cached, output), (second, cached_later, _) = [map(int, found) for found in LAST_TURN.findall(err)]
    assert (first, cached, output) == (len("<user>Hello\n<assistant>"), 0, 8)
    # The history is the first prompt, the answer (its last token is not computed) and the new message: whole pages.
    assert second == first + 8 + len("\n<user>More\n<assistant>")
    assert cached_later == (first + 8 - 1) // 16 * 16


def test_the_end_of_the_input_ends_the_conversation(capsys, monkeypatch, folder):
    assert talk(capsys, monkeypatch, folder, [])[:2] == (0, "")


def test_words_that_are_no_commands(capsys, monkeypatch, folder):
    status, out, err = talk(capsys, monkeypatch, folder, ["/rest", "/usr/bin is what?"])
    assert status == 0
    assert "there is no /rest: /reset forgets the conversation" in err
    assert len(out.splitlines()) >= 1


def test_a_full_context_and_a_template_that_refuses_end_nothing(capsys, monkeypatch, folder, said):
    strict = "{% if messages | length > 1 %}{{ raise_exception('One at a time!') }}{% endif %}{{ messages[0].content }}"
    status, out, err = talk(capsys, monkeypatch, folder, ["x" * 200, "Hello", "Hello"], "--chat-template", strict)
    assert status == 0
    assert "prompt: 200 tokens: must be fewer than max_model_len=128" in err
    assert "the chat template refuses them: One at a time!" in err
    with LLM(str(folder), **SHAPES) as llm:
        assert out == llm.generate("Hello", PARAMS)[0].outputs[0].text + "\n"


def test_a_template_from_a_file(capsys, monkeypatch, folder, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ word }}")
    arguments = ["--chat_template", tmp_path / "t.jinja", "--chat_template_kwargs", "{word: Hello}"]
    status, out, _ = talk(capsys, monkeypatch, folder, ["anything"], *arguments)
    with LLM(str(folder), **SHAPES) as llm:
        assert (status, out) == (0, llm.generate("Hello", PARAMS)[0].outputs[0].text + "\n")


def test_a_model_without_a_template_says_so_before_the_first_line(capsys, monkeypatch, folder, tmp_path):
    bare = write_tiny_checkpoint(tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text("{}")
    status, out, err = talk(capsys, monkeypatch, bare, ["Hello"])
    assert (status, out) == (1, "")
    assert "jaxserve: messages: this model's tokenizer has no chat template" in err


def test_what_is_refused(capsys, folder):
    refused(capsys, "chat", *flags(folder), "--n", 2, parts=["n=2"], status=1)
    refused(capsys, "chat", *flags(folder), "--sytem", "x", parts=["sytem", "did you mean 'system'"])
    refused(capsys, "chat", *flags(folder), "--chat-template", "absent.jinja", parts=["absent.jinja"], status=1)


def test_ctrl_c_stops_the_answer_and_not_the_program(capsys, monkeypatch, folder, said):
    """The signal comes in the middle of a step. What was said stays in the history."""
    step, steps = Engine.step, itertools.count()

    def interrupted_step(self):
        if next(steps) == 5:  # five steps compute the prompt
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted_step)
    before = signal.getsignal(signal.SIGINT)
    lines = ["Hello", "/stats", "/reset", "More"]
    status, out, err = talk(capsys, monkeypatch, folder, lines, "--system", "Short.")
    assert status == 0
    assert "[stopped by Ctrl-C]" in err
    [(_, _, tokens)] = LAST_TURN.findall(err)
    assert 1 <= int(tokens) < 8
    partial, rest = out.split("\n", 1)
    assert said[0].startswith(partial)
    assert 1 <= len(partial) < len(said[0])
    assert rest == said[2] + "\n", "the next answer is whole"
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_at_the_prompt_ends_nothing_and_a_second_one_during_an_answer_ends_the_program(
    capsys, monkeypatch, folder
):
    lines = iter([KeyboardInterrupt, "Hello"])

    def next_line(_=""):
        if (line := next(lines)) is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    def interrupted_twice(self):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("builtins.input", next_line)
    monkeypatch.setattr(Engine, "step", interrupted_twice)
    status, out, err = run(capsys, "chat", *flags(folder))
    assert (status, out) == (130, "")
    assert "/exit or Ctrl-D ends" in err
