"""Chats become the prompts that transformers makes of them, and what is wrong with one is said in plain words."""

import json
import subprocess
import sys

import pytest
from small_backends import byte_fallback_backend, byte_level_backend
from transformers import AutoTokenizer

from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer

# Llama 2's rules in short: roles alternate, the first token is written by the template.
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant/user!') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if shout %}!{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = {"role": "user", "content": "the cat"}
ANSWER = {"role": "assistant", "content": "the cat sat"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def save(folder, backend, **config):
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config})
    )
    return folder


@pytest.fixture(scope="module")
def strict_folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("strict"), byte_fallback_backend(), chat_template=STRICT)


@pytest.fixture(scope="module")
def strict(strict_folder):
    return ChatTemplate(Tokenizer.from_folder(strict_folder))


def assert_as_transformers(template, folder, messages, **options):
    """The same text and ids as `apply_chat_template(tokenize=True)`; returns the prompt."""
    prompt = template.prompt(messages, **options)
    options = {"add_generation_prompt": True, **options}
    options |= options.pop("chat_template_kwargs", {})
    theirs = AutoTokenizer.from_pretrained(folder)
    assert prompt["prompt"] == theirs.apply_chat_template(messages, tokenize=False, **options)
    assert prompt["prompt_token_ids"] == theirs.apply_chat_template(messages, return_dict=False, **options)
    return prompt


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [{"role": "system", "content": "Be brief."}, USER, ANSWER, {"role": "user", "content": "naïve 🎉\n\n12"}],
        [{"role": "user", "content": "<|im_end|> </s> <|im_start|>"}],
        [{"role": "user", "content": ""}],
        [ANSWER, {"role": "tool", "content": "7", "tool_call_id": "a"}],
    ],
)
@pytest.mark.parametrize("ask", [True, False])
def test_the_demo_models_template(demo_tokenizer, messages, ask):
    """Its folder is made from a GGUF file, which carries the template."""
    template = ChatTemplate(demo_tokenizer)
    assert_as_transformers(template, demo_tokenizer.folder, messages, add_generation_prompt=ask)


def test_special_tokens_are_written_by_the_template_alone(strict, strict_folder):
    assert Tokenizer.from_folder(strict_folder).encode("x")[0] == 1
    prompt = assert_as_transformers(strict, strict_folder, [USER])
    assert prompt["prompt"] == "<s>[user] the cat[assistant]"
    assert prompt["prompt_token_ids"].count(1) == 1


def test_every_option_reaches_the_template(strict, strict_folder):
    check = lambda messages, **options: assert_as_transformers(strict, strict_folder, messages, **options)["prompt"]
    continued = check([USER, ANSWER], add_generation_prompt=False, continue_final_message=True)
    assert continued == "<s>[user] the cat[assistant] the cat sat"
    assert '"name": "f"' in check([USER], tools=[TOOL])
    assert check([USER], chat_template_kwargs={"shout": True}).endswith("!" + "[assistant]")
    assert check([USER], chat_template="{{ messages[0].content }}{{ eos_token }}") == "the cat</s>"


def test_tools_may_be_functions(strict, strict_folder):
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: where
        """
        return city

    assert '"name": "weather"' in assert_as_transformers(strict, strict_folder, [USER], tools=[weather])["prompt"]
    with pytest.raises(ValueError, match="the chat template refuses them: Tools should"):
        strict.render([USER], tools=[3])


def test_a_model_with_several_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = ChatTemplate(Tokenizer.from_folder(save(tmp_path, byte_level_backend(), chat_template=named)))
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[TOOL]) == "tools"
    assert template.render([USER], chat_template="tool_use") == "tools"


def test_a_template_in_a_file_of_its_own(tmp_path):
    save(tmp_path, byte_level_backend())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}?")
    assert ChatTemplate(Tokenizer.from_folder(tmp_path)).render([USER]) == "the cat?"


def test_text_parts_are_joined_as_vllm_joins_them(strict):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    expected = strict.render([{"role": "user", "content": "a\nb"}])
    assert strict.render([{"role": "user", "content": parts}]) == expected
    assert len(parts) == 2


def test_calls_of_tools_have_their_arguments_parsed_and_need_no_content(strict):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    show = "{% for c in messages[1].tool_calls %}{{ c.function.arguments.x }}|{% endfor %}{{ messages[1].content }}"
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert strict.render(messages, chat_template=show) == "é|"
    assert call["function"]["arguments"] == '{"x": "é"}', "the caller's message was changed"
    call["function"]["arguments"] = '{"x": '
    with pytest.raises(ValueError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments must be JSON"):
        strict.render(messages, chat_template=show)


@pytest.mark.parametrize("messages", [[USER, USER], [ANSWER]])
def test_the_templates_own_words_are_passed_on(strict, messages):
    with pytest.raises(ValueError, match="the chat template refuses them: Roles must alternate user/assistant/user!"):
        strict.render(messages)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"^messages=\[\]: messages must be a list of at least one message$"),
        ((), r"^messages=\(\): "),
        (None, "^messages=None: "),
        ("hello", "^messages='hello': messages must be a list"),
        (USER, "^messages={.*: messages must be a list"),
        ([3], r"^messages\[0\]=3: messages\[0\] must be a dict with 'role' and 'content'"),
        ([USER, {"content": "x"}], r"^messages\[1\]\.role=None: messages\[1\]\.role must be one of 'system', "),
        ([{"role": "usr", "content": "x"}], r"^messages\[0\]\.role='usr'"),
        ([{"role": 3, "content": "x"}], r"^messages\[0\]\.role=3"),
        ([{"role": ["user"], "content": "x"}], r"^messages\[0\]\.role=\['user'\]"),
        ([{"role": "user"}], r"^messages\[0\]\.content=None: .* must be text, except beside tool_calls"),
        ([{"role": "assistant", "content": None}], r"^messages\[0\]\.content=None"),
        ([{"role": "user", "content": 3}], r"^messages\[0\]\.content=3: .* must be text or a list of text parts"),
        ([{"role": "user", "content": ["x"]}], r"^messages\[0\]\.content\[0\]='x': .* must be a text part"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"^messages\[0\]\.content\[0\]=.*image_url"),
        (
            [USER, {"role": "assistant", "content": "a\ud800"}],
            r"^messages\[1\]\.content must be valid.*U\+D800",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}],
            r"^messages\[0\]\.content\[0\]\.text must be valid Unicode",
        ),
        ([{**ANSWER, "tool_calls": 3}], r"^messages\[0\]\.tool_calls=3: .* must be a list"),
        ([{**ANSWER, "tool_calls": ["x"]}], r"^messages\[0\]\.tool_calls\[0\]='x': .* a dict with 'function'"),
    ],
)
def test_wrong_messages_are_refused_by_field_value_and_rule(strict, messages, message):
    with pytest.raises(ValueError, match=message):
        strict.prompt(messages)


def test_a_surrogate_that_reaches_the_text_another_way(strict):
    with pytest.raises(ValueError, match=r"^messages must be valid Unicode.*U\+D800"):
        strict.prompt([USER], tools=[{"type": "function", "function": {"name": "\ud800"}}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"continue_final_message": True}, "^continue_final_message=True: add_generation_prompt must be False"),
        ({"chat_template": "{% if %}"}, "the chat template refuses them: Expected an expression"),
        ({"chat_template": "{{ messages[0].content + 1 }}"}, "the chat template refuses them: can only concatenate"),
        ({"chat_template": "{{ 1 / 0 }}"}, "the chat template refuses them: division by zero"),
        ({"chat_template": "{{ messages[7].role }}"}, "the chat template refuses them: list object has no element 7"),
        ({"chat_template_kwargs": {"tokenize": True}}, r"^chat_template_kwargs=\['tokenize'\]: "),
        ({"chat_template_kwargs": {"messages": [], "tools": []}}, r"^chat_template_kwargs=\['messages', 'tools'\]: "),
    ],
)
def test_wrong_options_are_refused(strict, options, message):
    with pytest.raises(ValueError, match=message):
        strict.render([USER], **options)


def test_no_template(tmp_path):
    without = ChatTemplate(Tokenizer.from_folder(save(tmp_path, byte_level_backend())))
    for template in (without, ChatTemplate(Tokenizer(byte_level_backend()))):
        with pytest.raises(ValueError, match=r"^messages: this model's tokenizer has no chat template"):
            template.prompt([USER])
        own = template.prompt([USER], chat_template="<{{ messages[0].content }}>")
        assert own["prompt"] == "<the cat>"


def test_transformers_is_loaded_for_the_first_chat_only_and_gives_no_advice(strict_folder):
    code = (
        "import sys, os; before = dict(os.environ)\n"
        "from jaxserve.text.chat_template import ChatTemplate; from jaxserve.text.tokenizer import Tokenizer\n"
        "template = ChatTemplate(Tokenizer.from_folder(sys.argv[1])); assert 'transformers' not in sys.modules\n"
        "template.render([{'role': 'user', 'content': 'x'}]); assert dict(os.environ) == before"
    )
    result = subprocess.run([sys.executable, "-c", code, str(strict_folder)], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
