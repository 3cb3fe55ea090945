"""The engine's programs compiled for an H200 without one, and what the compiler says of them: `make gpu-compile`

Shapes only: no weights, no device. Per program: seconds of compilation, bytes aliased in place, temporary bytes,
copies of something as large as a layer's pages, what stands in the program's one command buffer and what does not,
and for each of our kernels the registers, the shared memory and the spills that ptxas reports. Printed as markdown,
and as JSON with --json; what is wrong with a program stands below them, and the exit status is 1. Nothing here says how
fast a program is.
"""

import argparse
import collections
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from jaxserve.bench.models import MODELS
from jaxserve.bench.ptx import (
    Kernel,
    compiler_output,
    kernels_of,
    ptx_of,
    stores_before_wgmma_are_fenced,
    stores_for_wgmma,
)
from jaxserve.cache import kv_cache
from jaxserve.cache.kv_cache import KVLayout
from jaxserve.config import SpeculativeConfig
from jaxserve.kernels_pallas.matmul import choose_linear
from jaxserve.kernels_pallas.paged_attention import choose_attention
from jaxserve.kernels_pallas.verify_draft import choose_verify
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.eagle import EagleConfig
from jaxserve.models.medusa import MedusaConfig
from jaxserve.runner import determinism, slots
from jaxserve.runner.compilation import Program
from jaxserve.runner.head import SCORE_ROWS
from jaxserve.runner.programs import COPIES, Programs
from jaxserve.runner.step import StepDefinition
from jaxserve.runner.weights import (
    EagleDefinition,
    EagleWeights,
    MedusaDefinition,
    MedusaWeights,
    ModelDefinition,
    Weights,
    flatten,
    flatten_head,
)
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.scheduler.buckets import Buckets
from jaxserve.speculative.ngram import NgramProposer

TARGET = Path(__file__).resolve().parents[2] / "configs" / "targets" / "h200.txtpb"
MIB = 2**20
DTYPE = jnp.dtype("bfloat16")
PAGE_SIZE, MAX_LEN = 64, 8192
BUCKETS = Buckets.make(max_num_batched_tokens=2048, max_num_seqs=256)
DRAFTS = 7
DRAFT_VOCAB, MEDUSA_HEADS = 32000, 4
POOL_BYTES = 16 * 2**30  # of the whole model


class Device(NamedTuple):
    """What the choosers ask of a device."""

    platform: str
    compute_capability: str
    device_kind: str


H200 = Device("gpu", "9.0", "NVIDIA H200")


@dataclass(frozen=True)
class Case:
    """A program of an engine for a model of `MODELS` cut to some of its layers, in one bucket.

    speculates: with drafts, `ngram` from a request's own text, `draft_model` by the same model with one layer, accepted
        by rejection sampling, `eagle` and `medusa` by a head that knows `DRAFT_VOCAB` tokens
    constrains: with grammars
    """

    model: str
    layers: int
    program: str
    bucket: int
    deterministic: bool = False
    speculates: str | None = None
    constrains: bool = False

    @property
    def programs(self) -> Programs:
        """All programs of the engine."""
        return describe(self.model, self.layers, self.deterministic, self.speculates, self.constrains)

    def __str__(self) -> str:
        mode = (", deterministic" if self.deterministic else "") + (f", {self.speculates}" if self.speculates else "")
        mode += ", grammars" if self.constrains else ""
        return f"{self.model}, {self.layers} layers, {self.program}[{self.bucket}]{mode}"


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program; sizes in bytes.

    `thunks` are the kinds at the top level, `commands` those inside command buffers with their number. `kernels` are
    the ones of ours that no program before it in this process had.
    """

    case: Case
    seconds: float
    donated: int
    aliased: int
    temporary: int
    pool_copies: list[str]
    thunks: list[str]
    commands: dict[str, int]
    kernels: list[Kernel]
    ptx: tuple[str, ...] = ()  # of these kernels


class Target:
    """A device that is not here."""

    def __init__(self, path: Path = TARGET):
        topology = topologies.get_topology_desc(
            path.stem, platform="cuda", topology="1x1x1", target_config=path.read_text()
        )
        self.sharding = SingleDeviceSharding(topology.devices[0])
        device = AbstractDevice(device_kind=H200.device_kind, num_cores=132, platform="cuda")
        # Pallas asks for the device that it lowers for; an abstract mesh answers where none is attached.
        self.mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device)

    def lower(self, function, arguments, donate: tuple[int, ...] = ()) -> jax.stages.Lowered:
        here = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.sharding)
        with jax.sharding.use_abstract_mesh(self.mesh):
            return jax.jit(function, donate_argnums=donate).lower(*jax.tree.map(here, arguments))


def unavailable() -> str | None:
    """Why nothing can be compiled for a GPU here, or None."""
    try:
        Target()
    except Exception as error:
        return f"the extra gpu-compile is not installed: {error}"
    return None


@cache
def describe(model: str, layers: int, deterministic: bool, speculates: str | None, constrains: bool) -> Programs:
    """The programs of an engine on Hopper, with what the choosers give such a device; arguments are those of `Case`."""
    config = ModelConfig.from_hf(MODELS[model] | {"num_hidden_layers": layers})
    definition, weights_like = _weights(config)
    layout = KVLayout(layers, config.num_kv_heads, config.head_dim, PAGE_SIZE, DTYPE)
    draft_definition = state = None
    if speculates in ("draft_model", "eagle", "medusa"):
        one = ModelConfig.from_hf(MODELS[model] | {"num_hidden_layers": 1})
        draft_definition, draft_like = _weights(one) if speculates == "draft_model" else _head(speculates, one)
        weights_like = weights_like._replace(draft=draft_like)
    if speculates in ("draft_model", "eagle"):
        layout = replace(layout, draft=replace(layout, num_layers=1))
    if speculates in ("eagle", "medusa"):
        state = jax.ShapeDtypeStruct((config.hidden_size,), DTYPE)
    attention = choose_attention(
        "auto", head_dim=config.head_dim, group=config.q_per_group, dtype=DTYPE, max_model_len=MAX_LEN, device=H200
    )
    linear = choose_linear("auto", DTYPE, products=config.products, deterministic=deterministic, device=H200)
    if deterministic and (missing := determinism.kernels_missing(attention, linear)):
        raise ValueError(f"{model}: {missing}")
    speculation, how = None, {}
    if speculates is not None:
        rule = "rejection" if speculates == "draft_model" else "agreement"
        speculation = SpeculativeConfig(method=speculates, num_speculative_tokens=DRAFTS, acceptance=rule)
        how = {"acceptance": rule, "least_chance": speculation.draft_confidence_threshold}
    step = StepDefinition(
        model=definition,
        attention=attention,
        max_tokens=BUCKETS.tokens[-1],
        max_logprobs=MAX_LOGPROBS,
        linear_kernel=linear,
        verify=choose_verify(device=H200),
        proposer=NgramProposer.of(speculation),
        draft=draft_definition,
        constrains=constrains,
        **how,
    )
    sizes = BUCKETS.rows[-1], MAX_LEN, -(-MAX_LEN // PAGE_SIZE), config.vocab_size
    remembered = DRAFTS if step.keeps_draft_logits else 0
    slots_like = jax.eval_shape(partial(slots.allocate, *sizes, draft_logits=remembered, state=state))
    num_layers = layers + (layout.draft is not None)
    num_pages = POOL_BYTES // MODELS[model]["num_hidden_layers"] // (layout.bytes_per_page // num_layers)
    return Programs(step, weights_like, kv_cache.abstract(layout, num_pages), slots_like, BUCKETS)


def _weights(config: ModelConfig) -> tuple[ModelDefinition, Weights]:
    """A model and the shapes of its weights."""
    return _shapes(lambda: flatten(Decoder(config, rngs=None, dtype=DTYPE)))


def _head(method: str, layer: ModelConfig) -> tuple[EagleDefinition | MedusaDefinition, EagleWeights | MedusaWeights]:
    """A draft head for a model like this layer, and the shapes of its weights."""
    sizes = {"vocab_size": layer.vocab_size, "target_hidden": layer.hidden_size, "draft_vocab": DRAFT_VOCAB}
    if method == "eagle":
        config = EagleConfig(method=method, layer=replace(layer, tie_word_embeddings=False), **sizes)
    else:
        config = MedusaConfig(**sizes, num_heads=MEDUSA_HEADS)
    _, target = _weights(layer)
    return _shapes(lambda target: flatten_head(config.new(DTYPE), target), target)


def _shapes(flattened: Callable, *arguments) -> tuple:
    """What is static in what `flattened` returns, and the shapes of its arrays."""
    definitions = []

    def arrays(*arguments):
        definition, arrays = flattened(*arguments)
        definitions.append(definition)
        return arrays

    like = jax.eval_shape(arrays, *arguments)
    return definitions[0], like


def program_of(case: Case) -> Program:
    """The program of a case."""
    found = [program for program in case.programs.all() if program.key == (case.program, case.bucket)]
    return found[0]


def inspect(case: Case, target: Target) -> Compiled:
    """Compile one program and read what the compiler says."""
    program = program_of(case)
    started = time.perf_counter()
    lowered = target.lower(program.function, program.arguments, program.donate)
    with tempfile.TemporaryDirectory() as folder:
        with compiler_output() as output:
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        seconds = time.perf_counter() - started
        thunks, commands = _thunks(Path(folder))
    memory = compiled.memory_analysis()
    donated = [leaf for index in program.donate for leaf in jax.tree.leaves(program.arguments[index])]
    layer = case.programs.kv[0].pages
    return Compiled(
        case,
        seconds,
        sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in donated),
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        pool_copies(compiled.as_text(), prod(layer.shape)),
        thunks,
        commands,
        kernels_of(output[0]),
        ptx_of(output[0]),
    )


def pool_copies(text: str, elements: int) -> list[str]:
    """Instructions of a compiled program that copy something of at least so many elements."""
    copies = []
    for line in text.splitlines():
        found = re.search(r"= \(?\w+\[([\d,]+)\]\S* (copy|copy-start|concatenate|transpose)\(", line)
        if found and prod(map(int, found[1].split(","))) >= elements:
            copies.append(line.strip())
    return copies


def _thunks(folder: Path) -> tuple[list[str], dict[str, int]]:
    """The kinds of the top-level thunks in order, and those inside command buffers with their number."""
    # Where nothing is gathered into command buffers (fewer than five thunks), there is only the first of the two.
    path = max(folder.glob("*.thunk_sequence*.txt"), key=lambda path: len(path.name))
    lines = path.read_text().splitlines()
    top = [found[1] for line in lines if (found := re.match(r"\d+: (k\w+)", line))]
    inside = [found[1] for line in lines if (found := re.match(r"\s+\d+: (k\w+)", line))]
    return top, dict(collections.Counter(inside))


def keys() -> list[tuple[str, int]]:
    """Every program of an engine, as `Programs.all` names them."""
    bodies = [("body", tokens) for tokens in BUCKETS.tokens]
    heads = [(name, rows) for rows in BUCKETS.rows for name in ("greedy_head", "head")]
    scores = [("score", SCORE_ROWS), ("score_all", SCORE_ROWS)]
    return [*bodies, *heads, *scores, ("admit", 1), ("set_tables", 1), ("copy_pages", COPIES)]


def cases(*, everything: bool) -> list[Case]:
    """The programs with two layers, and the whole model at one token bucket; or the whole model in all of them."""
    depth = {model: config["num_hidden_layers"] for model, config in MODELS.items()}
    verified = [("propose_ngram", 64), ("body", 64), ("greedy_head", 64), ("head", 64)]
    largest = "Llama-3-8B"
    found = []
    if everything:
        for model, layers in depth.items():
            found += [Case(model, layers, *key, mode) for mode in (False, True) for key in keys()]
            found += [Case(model, layers, *key, speculates="ngram") for key in verified]
        return [*found, Case(largest, depth[largest], "masked_head", 64, constrains=True)]
    for model, layers in depth.items():
        # The sampling head is by far the largest program, and the same in every bucket.
        found += [Case(model, 2, *key) for key in keys() if key[0] != "head" or key[1] == 64]
        found += [Case(model, 2, "body", tokens, True) for tokens in (8, 128, BUCKETS.tokens[-1])]
        found += [Case(model, 2, "greedy_head", 64, True), Case(model, layers, "body", BUCKETS.tokens[-1])]
        found += [Case(model, 2, *key, speculates="ngram") for key in verified]
        step = [("propose_by_model", 8), ("head", 64)]
        found += [Case(model, 2, *key, speculates="draft_model") for key in step]
    step = [("body", 64), ("propose_by_model", 8)]
    found += [Case(largest, 2, *key, speculates=head) for head in ("eagle", "medusa") for key in step]
    return [*found, Case(largest, 2, "masked_head", 64, constrains=True)]


def allowed_temporary(case: Case) -> int:
    """64 MiB, and beside them the logits, or in the larger token buckets what a layer makes of its rows: the residual
    stream and its norm, the fused products, queries and results by head, the gated product."""
    config = ModelConfig.from_hf(MODELS[case.model])
    if case.program in ("head", "masked_head", "greedy_head", "score", "score_all"):
        forms = 3 if case.program == "head" and case.bucket > 64 else 1
        return 64 * MIB + forms * 4 * case.bucket * config.vocab_size
    if case.bucket <= 64:
        return 64 * MIB
    (_, qkv), (heads, _), (_, gate_up) = (config.products[name] for name in ("qkv", "out", "gate_up"))
    widths = 3 * config.hidden_size + qkv + 3 * heads + gate_up * 3 // 2
    return 64 * MIB + case.bucket * 2 * widths


def faults(compiled: Compiled) -> list[str]:
    """What is wrong with a program."""
    case = compiled.case
    found = []
    # A proposer writes the number of drafts of every slot anew.
    made_anew = 4 * BUCKETS.rows[-1] if case.program.startswith("propose") else 0
    if compiled.aliased < compiled.donated - made_anew:
        found.append(f"{compiled.donated - compiled.aliased} donated bytes are copied")
    if compiled.pool_copies:
        found.append(f"pages are copied: {compiled.pool_copies[0]}")
    if compiled.temporary > allowed_temporary(case):
        found.append(f"{compiled.temporary / MIB:.1f} MiB temporary, {allowed_temporary(case) / MIB:.1f} are explained")
    found += [f"{kernel.name} spills" for kernel in compiled.kernels if kernel.spilled_bytes]
    found += [
        "a WGMMA reads what was stored without a fence"
        for text in compiled.ptx
        if stores_for_wgmma(text) and not stores_before_wgmma_are_fenced(text)
    ]
    found += [f"{kernel.name} multiplies one after the other" for kernel in compiled.kernels if kernel.serialized]
    small = len(compiled.thunks) < 5 and set(compiled.thunks) <= {"kCustomKernel", "kCopy", "kMemset"}
    loops = case.program == "propose_by_model" and case.speculates != "medusa"  # one command buffer a draft
    loops &= compiled.thunks.count("kWhile") == 1
    if compiled.thunks != ["kCommandBuffer"] and not small and not loops:
        found.append(f"not one command buffer: {compiled.thunks}")
    if case.program == "body" and compiled.commands.get("kCustomCall", 0) < case.layers * (
        5 if case.deterministic else 1
    ):
        found.append(f"our kernels are not in it: {compiled.commands}")
    return found


COLUMNS = ("program", "compiled in s", "in place MiB", "temporary MiB", "outside command buffers", "inside them")


def markdown(compiled: Compiled) -> str:
    """A program's row of the table."""
    outside = collections.Counter(kind for kind in compiled.thunks if kind != "kCommandBuffer")
    cells = (
        str(compiled.case),
        f"{compiled.seconds:.1f}",
        f"{compiled.aliased / MIB:,.0f}",
        f"{compiled.temporary / MIB:.1f}",
        _counted(outside),
        _counted(compiled.commands),
    )
    return f"| {' | '.join(cells)} |"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {kind.removeprefix('k')}" for kind, number in sorted(counts.items()))


def kernel_table(compiled: list[Compiled]) -> str:
    """Our kernels, each with the program that had it first."""
    lines = ["| kernel | first in | registers | bytes spilled |", "|---|---|---|---|"]
    lines += [
        f"| {kernel.name} | {one.case} | {kernel.registers} | {kernel.spilled_bytes} |"
        for one in compiled
        for kernel in one.kernels
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables and what is wrong with the programs; 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the whole models at one token bucket only")
    parser.add_argument("--only", default="", help="part of a program's name in the table: the others are left out")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(arguments)
    if reason := unavailable():
        parser.error(reason)
    target, found = Target(), []
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for case in cases(everything=not options.small):
        if options.only not in str(case):
            continue
        found.append(inspect(case, target))
        print(markdown(found[-1]), flush=True)
    print(f"\n{kernel_table(found)}")
    wrong = [f"{compiled.case}: {fault}" for compiled in found for fault in faults(compiled)]
    if options.json is not None:
        rows = [asdict(replace(compiled, ptx=())) for compiled in found]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if wrong:
        print("\nNot as it should be:\n\n" + "\n".join(f"- {fault}" for fault in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
