"""Everything that only hardware can tell about the Hopper kernels, in six minutes: `make gpu-check`

Correctness first: each kernel against its definition, and the bits of a row wherever it stands. Then speed, beside
what the device reaches with plain copies and products, its data sheet and its libraries. Needs JAX, Flax, NumPy and
jaxtyping, no network and no weights. Each figure is printed when it is there; then one table, and JSON with --json.
Most of the time goes into compiling some 200 programs; what has not begun after --limit seconds is not run, and failed,
but for the last section, which takes the time that is left.

`--interpret` runs every section on the CPU with tiny shapes and interpreted kernels: its times mean nothing.
"""

import argparse
from functools import partial
from pathlib import Path

import jax

from jaxserve.bench import gpu_attention, gpu_kernels, gpu_model, gpu_verify
from jaxserve.bench.gpu_sizes import FULL, TINY
from jaxserve.bench.report import Report


def main(arguments: list[str] | None = None) -> int:
    """Run the sections; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which nothing starts")
    parser.add_argument("--only", nargs="*", metavar="SECTION", help="names of the sections to run")
    parser.add_argument("--interpret", action="store_true", help="tiny shapes, interpreted on the CPU")
    options = parser.parse_args(arguments)
    sizes = TINY if options.interpret else FULL
    device = jax.local_devices()[0]
    if not options.interpret and getattr(device, "compute_capability", None) != "9.0":
        parser.error(f"needs a GPU of compute capability 9.0 (Hopper), this is {device.device_kind}; see --interpret")
    parts = (gpu_attention, gpu_verify, gpu_kernels, gpu_model)
    sections = {name: run for part in parts for name, run in part.CORRECTNESS.items()}
    sections["ceilings"] = gpu_kernels.ceilings
    for part in (gpu_attention, gpu_verify, gpu_model, gpu_kernels):
        sections |= part.SPEED
    sections |= gpu_attention.LAST
    unknown = set(options.only or ()) - sections.keys()
    if unknown:
        parser.error(f"unknown section {sorted(unknown)[0]!r}; there are {', '.join(sections)}")
    report = Report(options.limit)
    print(f"{device.device_kind}, JAX {jax.__version__}", flush=True)
    for name, run in sections.items():
        if not options.only or name in options.only:
            report.section(name, partial(run, sizes=sizes), needed=name not in gpu_attention.LAST)
    return report.finish(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
