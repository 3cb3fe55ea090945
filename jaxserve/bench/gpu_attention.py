"""Sections of `gpu_check` about paged attention."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.gpu_kernels import interpretation, random, seconds
from jaxserve.bench.gpu_sizes import Sizes
from jaxserve.bench.report import Report
from jaxserve.kernels_pallas.paged_attention import REFERENCE, AttentionBackend, mosaic_backend
from jaxserve.kernels_pallas.paged_attention.benchmark import Case, Heads, Timed, cases, cost
from jaxserve.kernels_pallas.paged_attention.mosaic import mosaic_attention
from jaxserve.kernels_pallas.paged_attention.mosaic.config import TileConfig
from jaxserve.kernels_pallas.paged_attention.work_list import QueryRun, pack_runs

_COMPANY = 3  # other sequences in a step


def backend_of(sizes: Sizes, heads: Heads, max_len: int) -> AttentionBackend:
    """Our kernels; interpreted, with splits of one block and few programs, so that tiny shapes have several."""
    config = None
    if sizes.interpret:
        config = TileConfig(
            split_blocks=1,
            decode_stages=2,
            decode_programs=1,
            prefill_stages=2,
            prefill_programs=1,
            small_bucket=8,
            interpret=interpretation(sizes),
        )
    kernels = mosaic_attention(head_dim=heads.head_dim, group=heads.group, max_model_len=max_len, config=config)
    return mosaic_backend(kernels)


class Cached:
    """Some sequences of the same length in shuffled pages, and the queries of the last `tokens` positions of the first.

    What no sequence owns holds large numbers and table entries that must not be used.
    """

    def __init__(self, heads: Heads, context: int, tokens: int, page_size: int):
        self.heads, self.context, self.page_size = heads, context, page_size
        source = np.random.default_rng(page_size)
        owned, sequences = -(-context // page_size), 1 + _COMPANY
        self.num_pages = sequences * owned + 3
        self.table = np.full((sequences, owned + 2), 2**30, np.int32)
        self.table[:, :owned] = source.permutation(self.num_pages)[: sequences * owned].reshape(sequences, owned)
        pages = np.full((self.num_pages, 2, heads.kv_heads, page_size, heads.head_dim), 1e4, np.float32)
        for row in self.table[:, :owned]:
            for index, page in enumerate(row):
                used = min(page_size, context - index * page_size)
                pages[page, :, :, :used] = source.standard_normal(pages[page, :, :, :used].shape)
        self.pages = jnp.asarray(pages, jnp.bfloat16)
        self.q = random(1, tokens, heads.kv_heads * heads.group, heads.head_dim)

    def attend(self, backend: AttentionBackend, first: int, count: int, *, company: int = 0) -> np.ndarray:
        """Results of `count` of the queries from `first` on, beside the last position of other sequences."""
        tokens = -(-(count + company) // 8) * 8
        start = self.context - len(self.q) + first
        runs = [QueryRun(0, start, count)]
        runs += [QueryRun(count + i, self.context - 1, 1) for i in range(company)]
        slot, position = np.full(tokens, len(self.table), np.int32), np.full(tokens, -1, np.int32)
        for index, run in enumerate(runs):
            slot[run.row : run.row + run.count] = index
            position[run.row : run.row + run.count] = run.start + np.arange(run.count)
        rows = np.concatenate([np.arange(first, first + count), np.zeros(tokens - count, int)])
        out = _attend(backend, self.heads.head_dim, self.num_pages, self.page_size, tokens)(
            pack_runs(backend.work, runs, tokens), self.table, slot, position, self.q[rows], self.pages
        )
        return np.asarray(out[:count], np.float32)


@cache
def _attend(backend: AttentionBackend, head_dim: int, num_pages: int, page_size: int, tokens: int):
    @jax.jit
    def attend(work, table, slot, position, q, pages):
        # The reference reads the whole table, so it gets one without entries that must not be used.
        table = jnp.minimum(table, num_pages - 1) if backend.name == "reference" else table
        unpacked = backend.work.unpack(work, tokens)
        prepared = backend.prepare(unpacked, table, slot, position, num_pages=num_pages, page_size=page_size)
        return backend.attend(q, pages, prepared, scale=head_dim**-0.5)

    return attend


def attention_numbers(report: Report, sizes: Sizes) -> None:
    """A chunk, a verification and a decode against the definition in float32: relative error under 1e-2."""
    for heads, page_size in sizes.attention:
        cached = Cached(heads, sizes.cached, sizes.chunk, page_size)
        ours = backend_of(sizes, heads, sizes.cached)
        for name, first, count in (("chunk", 0, sizes.chunk), ("verify", 3, 5), ("decode", sizes.chunk - 1, 1)):
            result, expected = (cached.attend(backend, first, count) for backend in (ours, REFERENCE))
            error = float(np.abs(result - expected).max() / np.abs(expected).max())
            what = f"{name}, {heads.group} x {heads.head_dim}, pages of {page_size}: relative error"
            report.add(what, error, ok=error < 1e-2)


def attention_bits(report: Report, sizes: Sizes) -> None:
    """A row decoded, decoded in company, verified among drafts, and inside a chunk: the same bits."""
    for heads, page_size in sizes.attention:
        cached = Cached(heads, sizes.cached, sizes.chunk, page_size)
        ours = backend_of(sizes, heads, sizes.cached)
        chunk = cached.attend(ours, 0, sizes.chunk)
        for row in sizes.chunk_rows:
            first = min(max(row - 2, 0), sizes.chunk - 5)
            others = {
                "decoded": cached.attend(ours, row, 1)[0],
                "decoded in company": cached.attend(ours, row, 1, company=_COMPANY)[0],
                "verified": cached.attend(ours, first, 5)[row - first],
            }
            for name, result in others.items():
                same = bool((result == chunk[row]).all())
                what = f"{heads.group} x {heads.head_dim}, pages of {page_size}, row {row} {name} and in a chunk"
                report.add(what, "same bits" if same else "differ", ok=same)


def decode_speed(report: Report, sizes: Sizes) -> None:
    """Bytes of keys and values per second; the share is that of the data sheet's bandwidth. Every batch and context
    with pages of one size, and of others what tells them apart."""
    for batch, context in sizes.decoded:
        if report.has_time(_decode_name(batch, context, sizes.page_size)):
            _time_decode(report, sizes, batch, context, sizes.page_size)
    for page_size in sizes.page_sizes[1:]:
        if report.has_time(_decode_name(*sizes.typical, page_size)):
            _time_decode(report, sizes, *sizes.typical, page_size)


def decode_speed_of_other_pages(report: Report, sizes: Sizes) -> None:
    """What `decode_speed` leaves out, as far as there is time."""
    for page_size in sizes.page_sizes[1:]:
        for batch, context in sizes.decoded:
            name = _decode_name(batch, context, page_size)
            if (batch, context) != sizes.typical and report.has_time(name):
                _time_decode(report, sizes, batch, context, page_size)


def _decode_name(batch: int, context: int, page_size: int) -> str:
    return f"decode {batch} x {context}, pages of {page_size}"


def _time_decode(report: Report, sizes: Sizes, batch: int, context: int, page_size: int) -> None:
    (case,) = (case for case in cases([batch], [context], [], 7) if case.name.startswith("decode"))
    _time(report, sizes, case, context, page_size, bandwidth=True)


def verify_speed(report: Report, sizes: Sizes) -> None:
    """Attention of a token and 7 drafts a sequence: the bytes of decode, more arithmetic."""
    (batch, context), count = sizes.typical, 8
    runs = [QueryRun(row * count, context - count, count) for row in range(batch)]
    case = Case(f"verify {batch} x {count} at {context}", runs, batch * count, 0)
    _time(report, sizes, case, context, sizes.page_size, bandwidth=True)


def prefill_speed(report: Report, sizes: Sizes) -> None:
    """Operations per second beside cuDNN's, which reads no pages."""
    heads = sizes.heads
    for prompt in sizes.prompts:
        (case,) = cases([], [], [prompt], 7)
        took = _time(report, sizes, case, prompt, sizes.page_size, bandwidth=False)
        q = random(1, 1, prompt, heads.kv_heads * heads.group, heads.head_dim)
        k, v = (random(seed, 1, prompt, heads.kv_heads, heads.head_dim) for seed in (2, 3))
        library = "xla" if sizes.interpret else "cudnn"
        call = jax.jit(partial(jax.nn.dot_product_attention, is_causal=True, implementation=library))
        peer = seconds(lambda call=call, q=q, k=k, v=v: call(q, k, v), sizes.repeats)
        rate = cost(heads, case.runs).operations / peer
        report.add(f"{library}, prompt of {prompt}", rate / 1e12, "TFLOP/s", share=peer / took)


def _time(report: Report, sizes: Sizes, case: Case, longest: int, page_size: int, *, bandwidth: bool) -> float:
    heads = sizes.heads
    timed = Timed(heads, case, backend_of(sizes, heads, longest), page_size, pool_bytes=sizes.pool_bytes)
    took = timed.seconds(sizes.repeats)
    of = cost(heads, case.runs)
    name = f"{case.name}, pages of {page_size}"
    if bandwidth:
        report.add(name, of.bytes / took / 1e9, "GB/s", share=of.floor / took)
    else:
        report.add(name, of.operations / took / 1e12, "TFLOP/s", share=of.floor / took)
    return took


CORRECTNESS = {"attention numbers": attention_numbers, "attention bits": attention_bits}
SPEED = {"decode speed": decode_speed, "draft attention speed": verify_speed, "prefill speed": prefill_speed}
LAST = {  # if there is time
    "decode of other pages speed": decode_speed_of_other_pages
}
