"""From process start to the first token of the demo, cold and warm: `python -m jaxserve.bench.startup`.

Cold: the model is converted, the compilation cache is empty. Warm: both are there. Each is a process of its own.
"""

import subprocess
import sys
import tempfile
import time

COMMAND = [sys.executable, "-m", "jaxserve.cli", "generate", "--config", "configs/demo.yaml"]


def first_token_seconds(cache: str) -> float:
    """Start the demo and wait for the first character after the first prompt's end."""
    started = time.perf_counter()
    command = [*COMMAND, "--engine.compilation_cache_dir", cache]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        seen = b""
        while b"<|im_start|>assistant\n" not in seen or seen.endswith(b"<|im_start|>assistant\n"):
            byte = process.stdout.read(1)
            if not byte:
                raise RuntimeError(f"the demo ended before its first token: {seen.decode()}")
            seen += byte
        seconds = time.perf_counter() - started
        process.stdout.read()
    return seconds


def main() -> None:
    from jaxserve.checkpoint.demo_model import demo_model_folder

    demo_model_folder()
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            print(f"{name}: first token {first_token_seconds(cache):.1f} s after the start of the process", flush=True)


if __name__ == "__main__":
    main()
