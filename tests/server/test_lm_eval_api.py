"""lm-evaluation-harness's own clients for OpenAI's API against our server."""

import json
from types import SimpleNamespace

import pytest
from checkpoint_tools import CHAT_TEMPLATE, SHAPES, write_tiny_checkpoint
from server_tools import NAME, local_server

from jaxserve import LLM, Engine, SamplingParams

pytestmark = pytest.mark.slow  # the harness takes seconds to import


def requests(*arguments):
    return [SimpleNamespace(args=each) for each in arguments]


def test_local_completions_and_local_chat_completions(tmp_path):
    clients = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.models.api_models import JsonChatStr

    folder = write_tiny_checkpoint(tmp_path / "model")
    greedy = SamplingParams(temperature=0, max_tokens=8)
    pairs = [("Q: one A:", " yes"), ("Q: one A:", " no"), ("Hello", " world")]
    messages = [{"role": "user", "content": "Hello"}]
    with LLM(str(folder), **SHAPES) as llm:
        scores = [llm.score(*pair)[0] for pair in pairs]
        text = llm.generate("Hello", greedy)[0].outputs[0].text
        answer = llm.chat([messages], greedy, chat_template=CHAT_TEMPLATE)[0].outputs[0].text
    with local_server(Engine(model=str(folder), **SHAPES)) as server:
        shared = {"model": NAME, "max_length": 100}
        lm = clients.LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions", tokenizer=str(folder), tokenizer_backend="huggingface", **shared
        )
        found = lm.loglikelihood(requests(*pairs), disable_tqdm=True)
        assert [logprob for logprob, _ in found] == pytest.approx([score.logprob for score in scores], abs=1e-4)
        assert [greedily for _, greedily in found] == [score.is_greedy for score in scores]
        options = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
        assert lm.generate_until(requests(("Hello", dict(options))), disable_tqdm=True) == [text.split("\n\n")[0]]
        chat = clients.LocalChatCompletion(base_url=f"{server.url}/v1/chat/completions", **shared)
        prompt = JsonChatStr(json.dumps(messages))
        assert chat.generate_until(requests((prompt, dict(options))), disable_tqdm=True) == [answer.split("\n\n")[0]]
