"""`jaxserve generate`: answers on stdout, everything that is wrong in one line on stderr."""

import ast
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_tools import SHAPES, write_tiny_checkpoint
from cli_tools import flags, refused, run

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.cli import main
from jaxserve.scheduler.scheduler import Scheduler

ROOT = Path(__file__).parent.parent
FIGURES = re.compile(
    r"^(\d+) requests in [\d.]+ s \(first token after [\d.]+ s\): (\d+) prompt tokens \([\d.]+/s\), "
    r"(\d+) output tokens \([\d.]+/s\), (\d+) prefix-cache hits, (\d+) steps, "
    r"(\d+) compilations \(\d+ from the cache\)$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture(scope="module")
def answers(folder):
    """What the library says to these prompts, by temperature 0 and 8 tokens."""
    prompts = ["Hello", "two words", "Hello"]
    with LLM(str(folder), **SHAPES) as llm:
        results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    return [(result.prompt, result.outputs[0].text) for result in results]


@pytest.fixture
def no_model(monkeypatch):
    """Fails the test if an engine is started."""

    def started(*_, **__):
        raise AssertionError("an engine was started")

    monkeypatch.setattr("jaxserve.llm.Engine", started)


@pytest.mark.parametrize("hyphens", [False, True], ids=["underscores", "hyphens"])
def test_a_prompt_is_answered(capsys, folder, answers, hyphens):
    status, out, err = run(capsys, "generate", "--prompt", answers[1][0], *flags(folder, hyphens))
    assert status == 0
    assert out.startswith(f"\n> two words\n{answers[1][1]}\n\n1 requests in ")
    requests, prompt_tokens, output_tokens, hits, steps, compilations = map(int, FIGURES.search(out).groups())
    assert (requests, prompt_tokens, output_tokens, hits) == (1, 9, 8, 0)
    assert steps == 9  # 8 tokens of the prompt, then one token a step
    assert compilations == 3
    assert err.startswith("memory: ")


def test_prompts_of_a_file_are_answered_in_order(capsys, tmp_path, folder, answers):
    lines = ["engine:", f"  model: {folder}", *(f"  {name}: {str(value).lower()}" for name, value in SHAPES.items())]
    lines += ["sampling: {temperature: 0.0, max_tokens: 3, ignore_eos: true}", "prompts:"]
    lines += [f"  - {prompt}" for prompt, _ in answers]
    (tmp_path / "job.yaml").write_text("\n".join(lines))
    status, out, _ = run(capsys, "generate", "--config", tmp_path / "job.yaml", "--sampling.max-tokens", 8)
    assert status == 0
    assert out.startswith("".join(f"\n> {prompt}\n{text}\n" for prompt, text in answers))
    assert FIGURES.search(out).group(1, 2, 3) == ("3", "19", "24")


def test_every_branch_is_printed_by_itself(capsys, folder, answers):
    status, out, _ = run(capsys, "generate", "--prompt", "Hello", "--sampling.n=2", *flags(folder))
    assert status == 0
    assert out.startswith(f"\n> Hello [1/2]\n{answers[0][1]}\n\n> Hello [2/2]\n{answers[0][1]}\n")


def test_a_failed_answer_says_so(capsys, folder, monkeypatch):
    complete = Scheduler.complete
    monkeypatch.setattr(Scheduler, "complete", lambda self, entry, token, finite: complete(self, entry, token, False))
    status, out, _ = run(capsys, "generate", "--prompt", "Hello", *flags(folder))
    assert status == 1
    assert "> Hello\n[error: activations at positions 0 to 4 are not finite" in out
    assert FIGURES.search(out)


def test_a_prompt_that_looks_like_an_option_stays_as_it_is(capsys, folder):
    status, out, _ = run(capsys, "generate", "--prompt", "--two-hyphens a-b=c-d", *flags(folder))
    assert (status, out.split("\n")[1]) == (0, "> --two-hyphens a-b=c-d")


def test_the_group_of_an_option_need_not_be_said(capsys, folder, answers):
    short = [re.sub(r"^--\w+\.", "--", flag) for flag in flags(folder)]
    assert "--temperature" in short
    status, out, _ = run(capsys, "generate", "--prompt", "Hello", *short)
    assert status == 0
    assert out.startswith(f"\n> Hello\n{answers[0][1]}\n")


@pytest.mark.parametrize("way", ["flags", "file"])
def test_every_engine_option_is_a_flag_and_a_key(capsys, tmp_path, monkeypatch, way):
    """All but `mesh`, which is an object of JAX's."""
    values = {
        "model": "a/model",
        "tokenizer": "a/tokenizer",
        "dtype": "float16",
        "max_model_len": 77,
        "page_size": 128,
        "num_pages": 9,
        "memory_utilization": 0.25,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 99,
        "scheduling_policy": "priority",
        "priority_aging_s": 1.5,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "async_scheduling": False,
        "attention_backend": "reference",
        "linear_backend": "xla",
        "deterministic": True,
        "generation_config": "none",
        "seed": -5,
        "compile": "warmup",
        "compilation_cache_dir": "a/folder",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 7},
        "runner": "pooling",
        "pooler_config": {"pooling_type": "MEAN", "normalize": False},
    }
    fields = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    assert values.keys() == fields.keys() - {"mesh"}
    assert not [name for name, value in values.items() if value == fields[name]], "a default is no test"
    found = []

    def load(config):
        found.append(config)
        raise ValueError("loaded")

    monkeypatch.setattr("jaxserve.cli.generate.load", load)
    if way == "file":
        (tmp_path / "job.yaml").write_text(json.dumps({"engine": values}))  # JSON is YAML
        arguments = ["--config", tmp_path / "job.yaml"]
    else:
        flat = lambda value: json.dumps(value) if isinstance(value, dict) else str(value).lower()
        arguments = [f"--engine.{name.replace('_', '-')}={flat(value)}" for name, value in values.items()]
    refused(capsys, "generate", "--prompt", "a", *arguments, parts=["loaded"], status=1)
    assert found == [EngineConfig(**values)]


def test_a_process_of_its_own(folder, answers):
    command = [sys.executable, "-m", "jaxserve.cli", "generate", "--prompt", "Hello", *flags(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"\n> Hello\n{answers[0][1]}\n")
    assert FIGURES.search(result.stdout)
    assert result.stderr.count("\n") == 1  # the memory plan and no warning


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--engine.max-num-seq", "3"], ["engine.max_num_seq", "did you mean 'engine.max_num_seqs'"]),
        (["--max-num-seq", "3"], ["max_num_seq", "did you mean 'engine.max_num_seqs'"]),
        (["--seed", "3"], ["unrecognized arguments: --seed"]),  # the engine's or the request's?
        (["--sampling.temprature=0"], ["sampling.temprature", "did you mean 'sampling.temperature'"]),
        (["--engine.mesh", "x"], ["engine.mesh"]),
        (["--engine.max_num_seqs", "many"], ["engine.max_num_seqs", "many", "int"]),
        (["--sampling.top-p", "high"], ["sampling.top_p", "high", "float"]),
        (["--sampling.stop_token_ids", "[a]"], ["sampling.stop_token_ids", "a"]),
        (["--prompts", "just one"], ["prompts", "just one"]),
        (["--prompt"], ["--prompt"]),
        (["stray"], ["stray"]),
        (["--config", "absent.yaml"], ["config", "absent.yaml"]),
    ],
)
def test_what_the_parser_refuses(capsys, no_model, arguments, parts):
    refused(capsys, "generate", *arguments, parts=parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("engine:\n  max_num_seq: 3\n", ["engine.max_num_seq", "did you mean 'engine.max_num_seqs'"]),
        ("engine:\n  page_size: large\n", ["page_size", "large"]),
        ("engine: 3\n", ["engine=3: engine must hold options by name"]),
        ("sampling: 3\n", ["sampling=3: sampling must hold options by name"]),
        ("prompt: [a\n", ["line 2"]),
        ("- a\n", ["config"]),
    ],
)
def test_what_is_wrong_in_a_file(capsys, tmp_path, no_model, text, parts):
    (tmp_path / "job.yaml").write_text(text)
    status = 1 if "by name" in parts[0] else 2  # the parser lets it through
    refused(capsys, "generate", "--prompt", "a", "--config", tmp_path / "job.yaml", parts=parts, status=status)


def test_commands(capsys, no_model):
    refused(capsys, "generat", parts=["generat", "generate", "chat", "info", "bench"])
    refused(capsys, "bench", parts=["benchmark", "throughput"])
    refused(capsys, parts=["command", "generate"])
    for command in (["generate"], ["chat"], ["info"], ["bench", "throughput"]):
        with pytest.raises(SystemExit) as help_shown:
            main([*command, "--help"])
        assert help_shown.value.code == 0
        assert "--engine.max_num_seqs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["prompts: none given"]),
        (["--prompt", "a", "--engine.dtype", "float"], ["dtype='float'", "did you mean 'float32'"]),
        (["--prompt", "a", "--engine.page-size", "17"], ["page_size=17", "16, 32"]),
        (["--prompt", "a", "--engine.deterministic", "maybe"], ["deterministic='maybe'", "True"]),
        (["--prompt", "a", "--sampling.top-p=1.5"], ["top_p=1.5", "at most 1"]),
    ],
)
def test_what_the_engine_would_refuse_is_said_before_a_model_is_loaded(capsys, no_model, arguments, parts):
    refused(capsys, "generate", *arguments, parts=parts, status=1)


def test_a_model_that_is_not_there(capsys):
    refused(capsys, "generate", "--prompt", "a", "--engine.model", "no-such", parts=["model='no-such'"], status=1)


def test_a_prompt_that_cannot_be_honoured(capsys, folder):
    status, out, err = run(capsys, "generate", "--prompt", "", *flags(folder))
    assert (status, out) == (1, "")
    assert err.splitlines()[1:] == ["jaxserve: prompt: it holds no tokens: it must hold at least one"]


def readme_blocks():
    """(language, text) of every code block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def test_options_in_the_readme_exist(capsys, no_model, monkeypatch, tmp_path):
    """The commands of the README's code blocks parse; they are stopped where the model would be loaded."""
    monkeypatch.chdir(tmp_path)  # where `eval` puts its results
    converted = []
    monkeypatch.setattr("jaxserve.checkpoint.convert.convert", lambda *given, **options: converted.append(given))

    def started(*_):
        raise AssertionError("an engine was started")

    monkeypatch.setattr("jaxserve.server.run.serve", started)
    blocks = [text for language, text in readme_blocks() if not language]
    commands = [line.split("#")[0] for block in blocks for line in block.splitlines() if "bin/jaxserve " in line]
    assert len(commands) >= 5
    for command in commands:
        arguments = shlex.split(command.partition("bin/jaxserve ")[2])
        arguments = [str(ROOT / part) if part.endswith(".yaml") else part for part in arguments]
        if arguments[0] in ("info", "convert"):  # these start no engine
            assert main(arguments) == 0
            continue
        with pytest.raises(AssertionError, match="an engine was started"):
            main(arguments)
    assert len(converted) == 1


def test_names_in_the_readmes_python_exist():
    """The keywords of every call in the README's Python blocks are fields or parameters of what is called."""
    fields = lambda cls: {field.name for field in dataclasses.fields(cls)}
    known = {"SamplingParams": fields(SamplingParams)} | dict.fromkeys(("LLM", "Engine"), fields(EngineConfig))
    blocks = [text for language, text in readme_blocks() if language == "python"]
    calls = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    seen = [(c.func.id, k.arg) for c in calls if getattr(c.func, "id", None) in known for k in c.keywords]
    assert len(seen) > 5
    assert [(name, keyword) for name, keyword in seen if keyword not in known[name]] == []


def test_the_demo_configuration_parses(no_model):
    with pytest.raises(AssertionError, match="an engine was started"):
        main(["generate", "--config", os.fspath(ROOT / "configs" / "demo.yaml")])


def test_what_is_left_open_is_as_the_model_says(capsys, tmp_path, answers):
    """generation_config.json: 3 tokens, greedy; a flag has the last word."""
    folder = write_tiny_checkpoint(tmp_path / "model")
    said = {"max_new_tokens": 3, "temperature": 0.0, "top_k": 5, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(said))
    shapes = [part for name, value in {"model": folder, **SHAPES}.items() for part in (f"--engine.{name}", str(value))]
    prompt, text = answers[1]
    command = ["generate", "--prompt", prompt, *shapes, "--ignore-eos", "true"]
    counts = {}
    for name, more in {
        "model": [],
        "flag": ["--max-tokens", "8"],
        "none": ["--engine.generation-config", "none", "--temperature", "0"],
    }.items():
        status, out, _ = run(capsys, *command, *more)
        assert status == 0
        counts[name] = int(FIGURES.search(out)[3])
        answer = out.removeprefix(f"\n> {prompt}\n").split("\n\n")[0]
        assert text.startswith(answer) or answer.startswith(text)  # greedy, whoever said so
    assert counts == {"model": 3, "flag": 8, "none": 16}
    with LLM(str(folder), **SHAPES) as llm:
        assert llm.engine.default_sampling_params == SamplingParams(temperature=0, max_tokens=3, top_k=5)
        assert len(llm.generate(prompt)[0].outputs[0].token_ids) <= 3
        assert len(llm.generate(prompt, SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 16
    (folder / "generation_config.json").write_text('{"temperature": -1}')
    refused(capsys, *command, parts=["generation_config.json", "temperature=-1", "generation_config='none'"], status=1)
