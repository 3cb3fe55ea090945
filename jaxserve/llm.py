"""The front door for scripts: prompts in, results out, in input order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, no_type_check

from jaxserve.beam_search import BeamSearchParams, beams_of
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.input_processor import Prompt
from jaxserve.models.decoder import Decoder
from jaxserve.outputs import BeamSearchOutput, EmbeddingOutput, RequestOutput
from jaxserve.pooling import embedding_of
from jaxserve.pooling_params import PoolingParams
from jaxserve.progress import progress_bar
from jaxserve.sampling_params import SamplingParams
from jaxserve.scoring import Score, Text, pair_up, score_of, scoring_params, split_tokens
from jaxserve.text.chat_template import ChatTemplate, Message
from jaxserve.text.tokenizer import Tokenizer


class LLM:
    """A model that answers batches of prompts.

        with LLM() as llm:
            for result in llm.generate(["The sky is", "Two plus two is"], SamplingParams(max_tokens=20)):
                print(result.outputs[0].text)

    Options are those of `EngineConfig`, as one object or as keywords; `engine` takes over one that exists.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        engine: Engine | None = None,
        **options,
    ):
        if engine is None and config is None:
            config = EngineConfig.from_dict({"model": model, **options})
        elif options or model is not None or None not in (engine, config):
            raise TypeError("give either a config or options, not both")
        self.engine = engine or Engine(config)
        self._next_id = 0
        self._arrived: dict[str, deque[RequestOutput]] = {}  # of each running request: where its stream reads

    @classmethod
    @no_type_check  # `Engine.from_flax` checks: the tests' type checker would come first with another error
    def from_flax(cls, model: Decoder, tokenizer: Tokenizer | None = None, **options) -> "LLM":
        """Over a Flax NNX model and with all options of `Engine.from_flax`."""
        return cls(engine=Engine.from_flax(model, tokenizer, **options))

    @no_type_check  # it checks itself: the tests' type checker would come first with another error
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """The finished results of all prompts, in input order.

        `prompts` is one prompt or a sequence of them, each text, token ids or a dict as in `Engine.add_request`;
        `sampling_params` is one for all (None: the defaults) or one each. Raises ValueError for a prompt or a
        parameter that cannot be honoured, before anything is computed. A request that fails while it runs has
        `finish_reason` "error" and says why in `error`; the others are not disturbed. `use_tqdm`: a progress bar
        on stderr; None shows it if that is a terminal.
        """
        prompts = _as_list(prompts)
        results: dict[str, RequestOutput] = {}
        with progress_bar(len(prompts), use_tqdm) as progress:
            for delta in self.stream(prompts, sampling_params):
                progress.update(delta)
                if delta.request_id in results:
                    results[delta.request_id].extend(delta)
                else:
                    results[delta.request_id] = delta
        return [results[request_id] for request_id in sorted(results, key=int)]

    @no_type_check
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any] | Callable] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The model's answers to one conversation or to several: `generate` on what the chat template makes of them.

        A conversation is a list of {"role": ..., "content": ...}; see `ChatTemplate.render` for the other options.
        """
        several = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], list | tuple)
        prompts = [
            self.chat_template.prompt(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in (messages if several else [messages])
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    @no_type_check
    def score(
        self,
        prompts: Text | Sequence[Text],
        continuations: Text | Sequence[Text],
        *,
        use_tqdm: bool | None = None,
    ) -> list[Score]:
        """How likely the model finds each continuation after its prompt; see `Score`.

        Equally many of both, as texts or token ids, or one prompt for all continuations. Only the continuations'
        tokens are scored, and prompts may come from the prefix cache. Raises ValueError for what cannot be scored
        before anything is computed.
        """
        pairs = [split_tokens(*pair, self.engine.tokenizer) for pair in pair_up(prompts, continuations)]
        params = [scoring_params(start) for _, start in pairs]
        results = self.generate([ids for ids, _ in pairs], params, use_tqdm=use_tqdm)
        return [score_of(result, start) for result, (_, start) in zip(results, pairs, strict=True)]

    @no_type_check
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[EmbeddingOutput]:
        """The embedding of each prompt, in input order, by a model that is made for it (`EngineConfig.runner`).

        `pooling_params` is one for all or one each. Raises ValueError for what cannot be honoured before anything is
        computed.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        return [embedding_of(result) for result in self.generate(prompts, params, use_tqdm=use_tqdm)]

    @no_type_check
    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, as `transformers.generate(num_beams=...)` finds them.

        Log-probabilities are those of the model (temperature 1). Raises ValueError for what cannot be honoured.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params={params!r}: must be a BeamSearchParams")
        return [beams_of(result, params) for result in self.generate(prompts, params, use_tqdm=False)]

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """What makes prompts of conversations; ValueError if there is no tokenizer."""
        if self.engine.tokenizer is None:
            raise ValueError("messages: a chat needs a tokenizer, and this engine has none")
        return ChatTemplate(self.engine.tokenizer)

    @no_type_check
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields what each step adds to each request; request ids count up in input order.

        Leaving the iterator early aborts what still runs. Several may be open at once.
        """
        prompts = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams | PoolingParams | BeamSearchParams):
            sampling_params = [sampling_params] * len(prompts)
        if not isinstance(sampling_params, Sequence):
            raise ValueError(f"sampling_params={sampling_params!r}: must be a SamplingParams or a sequence of them")
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"sampling_params: {len(sampling_params)} given for {len(prompts)} prompts: there must be one for all "
                "or one each"
            )
        return self._run(prompts, sampling_params)

    @no_type_check
    def _run(self, prompts, sampling_params) -> Iterator[RequestOutput]:
        arrived: deque[RequestOutput] = deque()
        open_ids: set[str] = set()
        try:
            for prompt, params in zip(prompts, sampling_params, strict=True):
                request_id = str(self._next_id)
                self.engine.add_request(request_id, prompt, params)
                self._next_id += 1
                self._arrived[request_id] = arrived
                open_ids.add(request_id)
            while open_ids:
                while not arrived:
                    self._step()
                output = arrived.popleft()
                if output.finished:
                    open_ids.remove(output.request_id)
                    del self._arrived[output.request_id]
                yield output
        finally:
            for request_id in open_ids & self._arrived.keys():  # none if the engine was closed meanwhile
                del self._arrived[request_id]
                self.engine.abort(request_id)

    def _step(self) -> None:
        """One step of the engine: each output goes to the stream that asked for it, if that is still open."""
        for output in self.engine.step():
            if (arrived := self._arrived.get(output.request_id)) is not None:
                arrived.append(output)

    @no_type_check
    def update_params(
        self, params: Any, *, running: str = "recompute", version: int | None = None, copy: bool = True
    ) -> None:
        """Replace the weights; see `Engine.update_params`. Open streams go on."""
        self.engine.update_params(params, running=running, version=version, copy=copy)

    def stats(self) -> dict[str, int | float | str]:
        """See `Engine.stats`."""
        return self.engine.stats()

    def close(self) -> None:
        """Give back the device's memory. Closing twice is fine."""
        self._arrived.clear()
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_) -> None:
        self.close()


@no_type_check
def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, a dict, or token ids) or several, as a list."""
    if isinstance(prompts, str | bytes | dict):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts={prompts!r}: must be a prompt or a sequence of prompts")
    prompts = list(prompts)
    one_of_ids = prompts and not any(hasattr(prompt, "__len__") for prompt in prompts)
    return [prompts] if one_of_ids else prompts
