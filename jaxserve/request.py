"""One sequence's life. Host side only: token ids, pages, counters and stop conditions; knows no JAX.

A user's request with `n` answers is a `RequestGroup` of `n` requests (branches), each scheduled by itself.

    WAITING ──admit──▶ RUNNING ──stop condition, abort, error──▶ FINISHED
       ▲                  │
       └──in-flight step──┘ preempt (PREEMPTED until the step in flight has arrived)
          has arrived
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from time import monotonic

from jaxserve.beam_search import BeamSearch, Following
from jaxserve.cache.block_pool import page_hash
from jaxserve.outputs import Logprob, RequestMetrics
from jaxserve.pooling import PooledPrompt
from jaxserve.sampling.tables import LogitsTables
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative.acceptance import Acceptance
from jaxserve.structured.compiler import Constraint

NO_TOKEN_LEFT = "no token is left"  # how the error of a request begins whose own fields forbid every token
GRAMMAR_GAVE_UP = "structured_outputs: the grammar is too complex"  # likewise


class RequestState(Enum):
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Request:
    """One branch. Lengths are in tokens.

    `num_computed` counts positions whose keys and values are computed by dispatched steps; `num_in_flight`
    counts sampled tokens that exist on the device but have not reached the host. `num_confirmed` counts
    computed positions whose step has arrived without an error: only those pages may be hashed. Both `num_computed`
    and `num_in_flight` are lower bounds while `drafts_in_flight` draft tokens are verified: so many more there may be.
    Positions before `writable` have pages that nobody else reads or can find. `stale`: some
    keys and values were computed with weights that have been replaced since, so no page may be hashed or shared.
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    arrival: int
    max_total_tokens: int
    stop_token_ids: frozenset[int]
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    fork_of: "Request | None" = None
    tables: LogitsTables | None = None
    constraint: Constraint | None = None  # of the output's form; as far as `token_ids`
    pooled: PooledPrompt | None = None  # what there is so far of an embedding
    num_following: int = 0  # of a beam: how many next tokens are wanted; its pages are kept for its forks
    arrival_time: float = field(default_factory=monotonic)

    state: RequestState = RequestState.WAITING
    token_ids: list[int] = field(init=False)
    # What the parameters say, looked up once: the scheduler asks for every token.
    only_scores: bool = field(init=False)  # no token is sampled (max_tokens=0): it ends when its prompt is computed
    only_greedy: bool = field(init=False)
    wants_rows: bool = field(init=False)  # log-probabilities besides those that the head gives, or hidden states
    pages: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    slot: int = -1
    num_computed: int = 0
    num_confirmed: int = 0
    num_registered: int = 0
    write_start: int = 0
    num_in_flight: int = 0
    drafts_in_flight: int = 0
    steps_in_flight: int = 0
    writable: int = 0
    draft_acceptance: Acceptance = field(default_factory=Acceptance)
    num_admissions: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # of the tokens scored so far; None: not asked for
    scheduled_time: float | None = None  # of the first admission; this and those below by `time.monotonic`
    first_token_time: float | None = None
    last_token_time: float | None = None
    stale: bool = False
    rank: float = 0.0  # the policy's own, while the request runs
    following: Following | None = None  # what may follow a beam
    num_forks: int = 0  # that wait to share the pages of a beam
    num_charged: int = 0  # positions that the policy `fair` has counted
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def __post_init__(self):
        self.token_ids = list(self.prompt_token_ids)
        self.only_scores = self.max_total_tokens <= len(self.prompt_token_ids)
        self.only_greedy = self.params.only_greedy
        self.wants_rows = self.params.prompt_logprobs is not None or self.params.logprobs == -1
        self.wants_rows |= self.pooled is not None
        self.restart_prompt()

    def restart_prompt(self) -> None:
        """Score or pool the prompt from its beginning."""
        if self.pooled is not None:
            self.pooled.restart()
        if self.params.prompt_logprobs is not None and self.index == 0:
            self.prompt_logprobs = [None] * min(max(self.params.prompt_logprobs_start, 1), len(self.token_ids))

    def continued(self, index: int, token: int) -> "Request":
        """The beam that goes on from this one with a token, over the same pages."""
        self.fork_of = None
        return Request(
            request_id=self.request_id,
            index=index,
            prompt_token_ids=[*self.prompt_token_ids, token],
            params=self.params,
            seed=self.seed,
            arrival=self.arrival - self.index + index,
            max_total_tokens=self.max_total_tokens + 1,
            stop_token_ids=self.stop_token_ids,
            priority=self.priority,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            fork_of=self,
            num_following=self.num_following,
            arrival_time=self.arrival_time,
            page_hashes=list(self.page_hashes),
        )

    @property
    def next_to_score(self) -> int | None:
        """The position of the first prompt token whose log-probability is still to come, or None."""
        scored = self.prompt_logprobs
        return None if scored is None or len(scored) >= len(self.prompt_token_ids) else len(scored)

    @property
    def needs_hidden_from(self) -> int | None:
        """The position of the first prompt token whose hidden state is still needed, whatever is cached; None for none.

        A token's log-probability needs the hidden state before it.
        """
        if self.pooled is not None:
            return self.pooled.next_position
        position = self.next_to_score
        return None if position is None else position - 1

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_to_compute(self) -> int:
        """Tokens whose keys and values are still to be computed; 0 if the last token that is allowed exists."""
        tokens = len(self.token_ids) + self.num_in_flight
        if tokens >= self.max_total_tokens and not self.only_scores:
            return 0
        return tokens - self.num_computed

    @property
    def most_drafts(self) -> int:
        """How many draft tokens may stand behind the next token, if all those in flight are accepted."""
        known = len(self.token_ids) + self.num_in_flight + self.drafts_in_flight
        return max(self.max_total_tokens - 1 - known, 0)

    def hashes(self, count: int, page_size: int) -> list[bytes]:
        """The hashes of the first `count` full pages, whose token ids must be on the host."""
        while len(self.page_hashes) < count:
            page = len(self.page_hashes)
            parent = self.page_hashes[-1] if page else b""
            tokens = self.token_ids[page * page_size : (page + 1) * page_size]
            self.page_hashes.append(page_hash(parent, tokens, self.cache_salt))
        return self.page_hashes[:count]

    def take_tokens(self, tokens: Sequence[int]) -> int:
        """Take sampled tokens up to the first that ends the request, by its id, by the form of the output or by the
        length. Returns how many."""
        known, taken = self.token_ids, 0
        for token in tokens:
            taken += 1
            known.append(token)
            if token in self.stop_token_ids:
                self.finish_reason = "stop"
                self.stop_reason = token if token in self.params.stop_token_ids else None
                break
            if self.constraint is not None and self.constraint.advance(token):
                self.finish_reason = "stop"
                break
            if len(known) >= self.max_total_tokens:
                self.finish_reason = "length"
                break
        return taken

    def fail_without_token(self) -> None:
        """The step could sample nothing: the request's own fields forbid every token."""
        self.finish_reason = "error"
        self.error = (
            f"{NO_TOKEN_LEFT} at position {len(self.token_ids)}: allowed_token_ids, bad_words, logit_bias, "
            "min_tokens and structured_outputs together forbid all"
        )

    def fail_with_overflow(self, start: int, count: int) -> None:
        """The step that computed these positions gave NaN or infinity."""
        self.finish_reason = "error"
        self.error = (
            f"activations at positions {start} to {start + count - 1} are not finite (NaN or infinity): "
            "the weights, the dtype or the prompt overflow"
        )


@dataclass(eq=False, slots=True)
class RequestGroup:
    """What a user asked for: `n` branches of one prompt under one id, or a search, whose beams are the branches."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    branches: list[Request]
    search: BeamSearch | None = None
    num_cached_tokens: int = 0  # of a search: those of its prompt

    @property
    def finished(self) -> bool:
        return all(branch.state is RequestState.FINISHED for branch in self.branches)

    def metrics(self) -> RequestMetrics:
        scheduled, first, last = (
            [time for branch in self.branches if (time := getattr(branch, name)) is not None]
            for name in ("scheduled_time", "first_token_time", "last_token_time")
        )
        arrival = self.branches[0].arrival_time
        return RequestMetrics(arrival, min(scheduled, default=None), min(first, default=None), max(last, default=None))
