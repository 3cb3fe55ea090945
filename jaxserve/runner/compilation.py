"""Compiles the engine's programs ahead of time, in parallel, through a cache of its own on disk.

JAX's own persistent cache is a global setting; this one belongs to the engine. An entry is named by the hash of
everything the executable depends on: the lowered program, JAX, the compiler's flags and the machine. The
folder is trusted like code: an entry is unpickled.

Lowering a program takes as long as loading ten, so a process remembers the names of the programs that it has lowered:
an engine of the same shapes as an earlier one only loads.
"""

import hashlib
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import jax
from jax.experimental import serialize_executable

from jaxserve.kernels_pallas.cpu.library import cpu_description

_STACK_BYTES = 64 * 2**20  # XLA recurses deeply on unrolled models; the default thread stack overflows
_NAMES: dict[Hashable, str] = {}  # of the entries of programs that this process has lowered


@dataclass(frozen=True)
class Program:
    """A function to compile for one bucket. `arguments` are arrays or shapes of the exact types it will get.

    Functions that are equal must trace alike, as for `jax.jit`; that goes for what a `partial` binds, too.
    """

    name: str
    bucket: int
    function: Callable
    arguments: tuple
    donate: tuple[int, ...]

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.bucket

    @property
    def signature(self) -> Hashable:
        """Equal for programs that trace alike."""
        function = self.function
        bound = function
        if isinstance(function, partial):  # which is equal to nothing but itself
            bound = function.func, function.args, tuple(function.keywords.items())
        leaves, tree = jax.tree.flatten(self.arguments)
        types = tuple((leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)) for leaf in leaves)
        return bound, tree, types, self.donate


class Compiler:
    """Executables by (program name, bucket). Thread-safe; counts what it compiled and what it loaded.

    `options` are XLA's, by name, for what is compiled from now on.
    """

    def __init__(self, cache_dir: Path | None, devices: Sequence[jax.Device]):
        self.cache_dir = cache_dir
        self.devices = tuple(devices)
        self.options: dict[str, int | bool | str] = {}
        self.num_compiled = 0
        self.num_loaded = 0
        self.num_after_warmup = 0
        self._warm = False
        self._executables: dict[tuple[str, int], jax.stages.Compiled] = {}
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._prefetched: dict[tuple[str, int], jax.stages.Compiled | None] = {}
        self._building: dict[tuple[str, int], threading.Lock] = {}

    def get(self, program: Program) -> jax.stages.Compiled:
        """The executable of a program, compiled now if it is not there yet."""
        executable = self._executables.get(program.key)
        return executable if executable is not None else self._build(program)

    def get_all(self, programs: Sequence[Program]) -> list[jax.stages.Compiled]:
        """The executables of several programs; what is missing is compiled in parallel."""
        missing = [program for program in programs if program.key not in self._executables]
        if len(missing) > 1:
            self._build_all(missing)
        return [self.get(program) for program in programs]

    def has(self, program: Program) -> bool:
        """Whether a program runs at once."""
        return program.key in self._executables

    def executables(self) -> dict[tuple[str, int], jax.stages.Compiled]:
        return dict(self._executables)

    def clear(self) -> None:
        """Forget the executables, those that are being loaded too."""
        for thread in self._threads:
            thread.join()
        self._executables.clear()
        self._prefetched.clear()

    def warm_up(self, programs: Sequence[Program], progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compile all programs in parallel; `progress(done, total, name)` is called after each.

        Whatever is compiled later is counted in `num_after_warmup`.
        """
        self._build_all(programs, progress)
        self._warm = True

    def _build_all(self, programs: Sequence[Program], progress: Callable[[int, int, str], None] | None = None) -> None:
        previous = threading.stack_size(_STACK_BYTES)
        try:
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
                futures = [(program, threads.submit(self.get, program)) for program in programs]
                for done, (program, future) in enumerate(futures, 1):
                    future.result()
                    if progress is not None:
                        progress(done, len(programs), f"{program.name}[{program.bucket}]")
        finally:
            threading.stack_size(previous)

    def prefetch(self, program: Program) -> None:
        """Load a program in the background if an earlier process has compiled it; `get` waits for it."""
        if self.cache_dir is not None:
            thread = threading.Thread(target=self._prefetch, args=(program,), name="jaxserve-prefetch")
            thread.start()
            self._threads.append(thread)

    def _prefetch(self, program: Program) -> None:
        with self._lock_of(program):
            if program.key not in self._executables:
                path, _ = self._entry(program)
                self._prefetched[program.key] = _load(path, self.devices)

    def _build(self, program: Program) -> jax.stages.Compiled:
        with self._lock_of(program):
            if program.key in self._executables:
                return self._executables[program.key]
            executable, lowered, path = self._prefetched.pop(program.key, None), None, None
            if executable is None and self.cache_dir is not None:
                path, lowered = self._entry(program)
                executable = _load(path, self.devices)
            loaded = executable is not None
            if executable is None:
                lowered = lowered or _lower(program)
                executable = lowered.compile(compiler_options=self.options or None)
                if path is not None:
                    _store(path, executable)
            with self._lock:
                self._executables[program.key] = executable
                self.num_loaded += loaded
                self.num_compiled += not loaded
                self.num_after_warmup += self._warm
            return executable

    def _lock_of(self, program: Program) -> threading.Lock:
        """One builder per program: whoever comes second waits and finds it done."""
        with self._lock:
            return self._building.setdefault(program.key, threading.Lock())

    def _entry(self, program: Program) -> tuple[Path, jax.stages.Lowered | None]:
        """Where the program's executable is kept, and the lowered program unless that was known."""
        settings = repr([(name, getattr(jax.config, name, value)) for name, value in jax.config.values.items()])
        known = program.signature, self.devices, tuple(sorted(self.options.items())), settings
        name, lowered = _NAMES.get(known), None
        if name is None:
            lowered = _lower(program)
            name = _NAMES[known] = _key(lowered, self.devices, self.options)
        return self.cache_dir / name, lowered


def _lower(program: Program) -> jax.stages.Lowered:
    return jax.jit(program.function, donate_argnums=program.donate).lower(*program.arguments)


def _key(lowered: jax.stages.Lowered, devices: tuple[jax.Device, ...], options: dict) -> str:
    digest = hashlib.sha256(lowered.as_text().encode())
    # The text shows neither arguments that the program does not use nor the trees around them.
    digest.update(f"{lowered.args_info} {lowered.out_tree}".encode())
    digest.update(_machine().encode())
    digest.update(repr([device.id for device in devices]).encode())
    digest.update(f"{os.environ.get('XLA_FLAGS', '')} {sorted(options.items())}".encode())
    return digest.hexdigest()


@cache
def _machine() -> str:
    device = jax.devices()[0]
    return "\n".join([jax.__version__, device.client.platform_version, device.device_kind, cpu_description()])


def _load(path: Path, devices: tuple[jax.Device, ...]) -> jax.stages.Compiled | None:
    try:
        return serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()), execution_devices=devices)
    except FileNotFoundError:
        return None
    except Exception:  # a torn or foreign entry: whatever is wrong with it, compiling again is right
        return None


def _store(path: Path, executable: jax.stages.Compiled) -> None:
    """Write atomically: another process may read or write the same entry."""
    try:
        payload = pickle.dumps(serialize_executable.serialize(executable))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(payload)
        os.replace(file.name, path)
    except (OSError, ValueError, NotImplementedError):
        return  # a cache that cannot be written costs time, nothing else
