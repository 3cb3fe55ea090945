"""The common cases that peers are measured with: `python -m jaxserve.bench.offline [--dtype float32] ...`

`jaxserve bench throughput --cases ...` with what the peers have: no prefix cache (random prompts share nothing).
"""

import sys

from jaxserve.bench.workload import CASES
from jaxserve.cli import main

if __name__ == "__main__":
    fixed = ["--enable-prefix-caching", "false", "--max-model-len", "2048", "--repeats", "2", "--cases", *CASES]
    sys.exit(main(["bench", "throughput", *fixed, *sys.argv[1:]]))
