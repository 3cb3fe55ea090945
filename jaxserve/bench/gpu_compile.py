"""The engine's programs compiled for an H200 without one, and what the compiler says of them: `make gpu-compile`

Shapes only: no weights, no device. Per program: seconds of compilation, bytes aliased in place, temporary bytes,
copies of something as large as a layer's pages, what stands in the program's one command buffer and what does not,
and for each of our kernels the registers, the shared memory and the spills that ptxas reports. Printed as markdown,
and as JSON with --json. Nothing here says how fast a program is.
"""

import argparse
import collections
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from jaxserve.bench.models import MODELS
from jaxserve.cache import kv_cache
from jaxserve.cache.kv_cache import KVLayout
from jaxserve.kernels_pallas.paged_attention import XLA
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.runner import slots
from jaxserve.runner.compilation import Program
from jaxserve.runner.programs import Programs
from jaxserve.runner.step import StepDefinition
from jaxserve.runner.weights import flatten
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.scheduler.buckets import Buckets

TARGET = Path(__file__).resolve().parents[2] / "configs" / "targets" / "h200.txtpb"
MIB = 2**20


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one of our kernels."""

    name: str
    registers: int
    spilled_bytes: int


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program; sizes in bytes. `commands` are the kinds in its command buffers."""

    model: str
    layers: int
    program: str
    bucket: int
    seconds: float
    donated: int
    aliased: int
    temporary: int
    pool_copies: list[str]
    thunks: list[str]
    commands: dict[str, int]
    kernels: list[Kernel] = field(default_factory=list)


class Target:
    """A device that is not here: `shape` puts a description on it, `lower` and `compile` work for it."""

    def __init__(self, path: Path = TARGET):
        topology = topologies.get_topology_desc(
            path.stem, platform="cuda", topology="1x1x1", target_config=path.read_text()
        )
        self.sharding = SingleDeviceSharding(topology.devices[0])
        device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
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


def describe(
    model: str,
    *,
    layers: int,
    buckets: Buckets,
    attention=XLA,
    linear_kernel=None,
    dtype: str = "bfloat16",
    page_size: int = 64,
    max_len: int = 8192,
    pool_bytes: int = 16 * 2**30,
) -> Programs:
    """The programs of an engine for a model of `MODELS` cut to some layers; the pool is so much for every layer."""
    config = ModelConfig.from_hf(MODELS[model] | {"num_hidden_layers": layers})
    definitions = []

    def weights():
        definition, arrays = flatten(Decoder(config, rngs=None, dtype=jnp.dtype(dtype)))
        definitions.append(definition)
        return arrays

    weights_like = jax.eval_shape(weights)
    layout = KVLayout(layers, config.num_kv_heads, config.head_dim, page_size, jnp.dtype(dtype))
    step = StepDefinition(definitions[0], attention, buckets.tokens[-1], MAX_LOGPROBS, None, linear_kernel, None)
    max_pages = -(-max_len // page_size)
    slots_like = jax.eval_shape(partial(slots.allocate, buckets.rows[-1], max_len, max_pages, config.vocab_size))
    num_pages = pool_bytes // MODELS[model]["num_hidden_layers"] // (layout.bytes_per_page // layers)
    return Programs(step, weights_like, kv_cache.abstract(layout, num_pages), slots_like, buckets)


def inspect(model: str, programs: Programs, program: Program, target: Target) -> Compiled:
    """Compile one program and read what the compiler says."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        lowered = target.lower(program.function, program.arguments, program.donate)
        with _mosaic_output() as output:
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        seconds = time.perf_counter() - started
        thunks, commands = _thunks(Path(folder))
    memory = compiled.memory_analysis()
    donated = sum(
        prod(leaf.shape) * leaf.dtype.itemsize
        for index in program.donate
        for leaf in jax.tree.leaves(program.arguments[index])
    )
    return Compiled(
        model,
        len(programs.kv),
        program.name,
        program.bucket,
        seconds,
        donated,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        pool_copies(compiled.as_text(), prod(programs.kv[0].pages.shape)),
        thunks,
        commands,
        _kernels(output[0]),
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
    (path,) = folder.glob("*thunk_sequence_after*")
    lines = path.read_text().splitlines()
    top = [found[1] for line in lines if (found := re.match(r"\d+: (k\w+)", line))]
    inside = [found[1] for line in lines if (found := re.match(r"\s+\d+: (k\w+)", line))]
    return top, dict(collections.Counter(inside))


@contextmanager
def _mosaic_output():
    """What the compiler writes to the process's standard output, which is where Mosaic reports ptxas' words."""
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    output = [""]
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        saved = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield output
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            output[0] = file.read().decode(errors="replace")


def _kernels(text: str) -> list[Kernel]:
    """What `ptxas -v` says, in its order."""
    kernels = []
    for part in re.split(r"Compiling entry function ", text)[1:]:
        name = re.match(r"'(.*?)'", part)[1]
        spills = [int(size) for size in re.findall(r"(\d+) bytes spill (?:stores|loads)", part)]
        kernels.append(Kernel(name, int(re.search(r"Used (\d+) registers", part)[1]), sum(spills)))
    return kernels


def selection(*, everything: bool) -> Iterator[tuple[str, Programs, Program]]:
    """What is compiled: every program with two layers, and the whole model at one token bucket or at all."""
    buckets = Buckets.make(2048, 256)
    for model, config in MODELS.items():
        two = describe(model, layers=2, buckets=buckets)
        for program in two.all():
            yield model, two, program
        whole = describe(model, layers=config["num_hidden_layers"], buckets=buckets)
        for tokens in buckets.tokens if everything else (64,):
            yield model, whole, whole.body(tokens)


COLUMNS = (
    "model",
    "layers",
    "program",
    "compiled in s",
    "in place MiB",
    "temporary MiB",
    "outside command buffers",
    "inside",
    "our kernels",
)


def markdown(compiled: Compiled) -> str:
    """A program's row of the table."""
    ours = collections.Counter(
        f"{kernel.name} ({kernel.registers} registers, {kernel.spilled_bytes} B spilled)" for kernel in compiled.kernels
    )
    cells = (
        compiled.model,
        compiled.layers,
        f"{compiled.program}[{compiled.bucket}]",
        f"{compiled.seconds:.1f}",
        f"{compiled.aliased / MIB:,.0f}",
        f"{compiled.temporary / MIB:.1f}",
        _counted(collections.Counter(kind for kind in compiled.thunks if kind != "kCommandBuffer")),
        _counted(compiled.commands),
        _counted(ours),
    )
    return f"| {' | '.join(map(str, cells))} |"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in counts.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the whole models at one token bucket only")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    if reason := unavailable():
        parser.error(reason)
    target, found = Target(), []
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for model, programs, program in selection(everything=not options.small):
        found.append(inspect(model, programs, program, target))
        print(markdown(found[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(compiled) for compiled in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
