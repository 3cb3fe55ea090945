"""A beam search's life in the engine: its beams are requests of one token, over the pages of those before them."""

from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.request import RequestGroup
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.text.tokenizer import Tokenizer


def go_on(group: RequestGroup, scheduler: Scheduler) -> bool:
    """Take the search's next step when all its beams have been heard of. Returns whether the search is done."""
    beams, search = group.branches, group.search
    if any(beam.following is None for beam in beams):
        return False
    if beams[0].num_prompt_tokens == len(group.prompt_token_ids):
        group.num_cached_tokens = beams[0].num_cached_tokens
    search.advance([beam.following for beam in beams])
    if not search.done:
        group.branches = [
            beams[beam.parent].continued(index, beam.token_ids[-1]) for index, beam in enumerate(search.running)
        ]
        for branch in group.branches:
            scheduler.add(branch)
    for beam in beams:
        if not beam.num_forks:
            scheduler.held.release(beam)
    return search.done


def result_of(group: RequestGroup, tokenizer: Tokenizer | None) -> RequestOutput:
    """The result of a search that is done; the texts are empty without a tokenizer."""
    outputs = []
    for index, found in enumerate(group.search.results):
        shown = found.token_ids[:-1] if found.finish_reason == "stop" else found.token_ids
        text = "" if tokenizer is None else tokenizer.decode(shown)
        output = CompletionOutput(index, text, found.token_ids, finish_reason=found.finish_reason)
        output.cumulative_logprob = found.cumulative_logprob
        outputs.append(output)
    prompt, ids, cached = group.prompt, group.prompt_token_ids, group.num_cached_tokens
    return RequestOutput(group.request_id, prompt, ids, outputs, True, cached, metrics=group.metrics())
