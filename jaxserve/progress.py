"""What long work says about itself: a bar over the requests of a batch, and a line while programs are compiled."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxserve.outputs import RequestOutput

CompileProgress = Callable[[int, int, str], None]  # programs compiled so far, of how many, the name of the last


class Progress:
    """Counts what a batch has done so far; `bar` is a tqdm bar over its requests."""

    def __init__(self, bar):
        self._bar = bar
        self._prompt_tokens = self._output_tokens = 0

    def update(self, delta: RequestOutput) -> None:
        """Count what one step added to a request. Its prompt counts when the request is done."""
        self._output_tokens += sum(len(output.token_ids) for output in delta.outputs)
        if not delta.finished or self._bar.disable:
            return
        self._prompt_tokens += len(delta.prompt_token_ids)
        seconds = max(self._bar.format_dict["elapsed"], 1e-9)
        rates = f"prompt {self._prompt_tokens / seconds:.1f}, output {self._output_tokens / seconds:.1f} tokens/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update()


@contextmanager
def progress_bar(requests: int, show: bool | None) -> Iterator[Progress]:
    """A bar over `requests` on stderr; `show` None means only if that is a terminal."""
    from tqdm import tqdm  # imported by those who generate, not by those who import jaxserve

    disable = None if show is None else not show  # None is tqdm's own word for "only on a terminal"
    with tqdm(total=requests, desc="Processed prompts", unit="req", dynamic_ncols=True, disable=disable) as bar:
        yield Progress(bar)


def print_compiled(done: int, total: int, name: str) -> None:
    """One line that rewrites itself on a terminal, a line for each program elsewhere."""
    start, end = ("\r", "\n" if done == total else "") if sys.stderr.isatty() else ("", "\n")
    print(f"{start}jaxserve: compiled {done}/{total} {name:<24}", end=end, file=sys.stderr, flush=True)


@contextmanager
def item_bar(items: int, done: int, show: bool | None) -> Iterator:
    """A bar over a job's items, `done` of them from an earlier run; it shows the rate and the time left."""
    from tqdm import tqdm

    disable = None if show is None else not show
    with tqdm(total=items, initial=done, unit="item", dynamic_ncols=True, disable=disable) as bar:
        yield bar
