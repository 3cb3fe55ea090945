"""What an engine counts, step by step (no JAX); distributions of times are in `metrics.py`."""

from collections import Counter
from dataclasses import dataclass, field

from jaxserve.scheduler.buckets import Buckets
from jaxserve.scheduler.plan import StepPlan
from jaxserve.scheduler.scheduler import Scheduler


@dataclass
class Counters:
    """What the engine counts itself; see `Engine.stats`."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    constrained_steps: int = 0
    computed_tokens: int = 0
    padded_tokens: int = 0
    owned_positions: int = 0
    used_positions: int = 0
    finished: Counter = field(default_factory=Counter)

    def count_step(self, plan: StepPlan, scheduler: Scheduler, buckets: Buckets) -> None:
        tokens = plan.num_tokens
        self.steps += 1
        self.constrained_steps += plan.constrained
        self.computed_tokens += tokens
        self.padded_tokens += buckets.token_bucket(tokens) - tokens
        self.owned_positions += sum([len(request.pages) for request in scheduler.running]) * scheduler.page_size
        self.used_positions += sum([request.num_computed for request in scheduler.running])

    def stats(self) -> dict[str, int | float]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "steps": self.steps,
            "constrained_steps": self.constrained_steps,
            "computed_tokens": self.computed_tokens,
            "padding_waste": self.padded_tokens / max(self.computed_tokens + self.padded_tokens, 1),
            "kv_waste": (self.owned_positions - self.used_positions) / max(self.owned_positions, 1),
            **{f"request_success_{reason}": count for reason, count in sorted(self.finished.items())},
        }
