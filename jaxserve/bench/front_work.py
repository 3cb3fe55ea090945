"""What a streamed token costs the server's front: `python -m jaxserve.bench.front_work [--clients 1 32]`

The server is the real one, on its socket, over an engine whose device answers at once (`host_work.py`) and whose steps
are held to `--pace` per second, so that every event carries one token. Counted is the CPU time of the thread that
does HTTP, JSON and the event loop; clients read in another thread, and the engine runs in its own.
"""

import argparse
import asyncio
import threading
import time

from jaxserve.async_engine import AsyncEngine
from jaxserve.bench.client import Client
from jaxserve.bench.host_work import instant_engine
from jaxserve.bench.serving import Load, drive
from jaxserve.checkpoint.loading import model_folder
from jaxserve.config import EngineConfig
from jaxserve.server.config import ServerConfig
from jaxserve.server.run import Server, listen
from jaxserve.server.service import Service
from jaxserve.text.tokenizer import Tokenizer

# The instant device samples a special token: it is shown, so that there is text.
BODY = {"prompt": [5] * 50, "ignore_eos": True, "skip_special_tokens": False, "temperature": 0, "stream": True}
BODY |= {"stream_options": {"include_usage": True}}


def microseconds_per_token(clients: int, *, tokens: int = 200, pace: float = 40.0, **body) -> float:
    """CPU time of the server's thread for each token of so many streams at once."""
    engine = instant_engine(clients, 2 * max(clients, 64), text=Tokenizer.from_folder(model_folder(None)))
    step = engine.step

    def paced():
        time.sleep(1 / pace)
        return step()

    engine.step = paced
    service = Service(
        ServerConfig(port=0), EngineConfig(max_num_seqs=clients), lambda progress: AsyncEngine(engine=engine)
    )
    listening = listen(service.config)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = Server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while service.starting:
            time.sleep(0.01)
        clock = time.pthread_getcpuclockid(thread.ident)
        client = Client(url, "/v1/completions")
        run = lambda count: asyncio.run(drive(client, [BODY | {"max_tokens": count} | body] * clients, Load()))
        run(5)
        started = time.clock_gettime(clock)
        outcomes = run(tokens)
        spent = time.clock_gettime(clock) - started
        wrong = [outcome.error for outcome in outcomes if outcome.error]
        if wrong:
            raise RuntimeError(wrong[0])
        return 1e6 * spent / sum(outcome.output_tokens for outcome in outcomes)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", nargs="*", type=int, default=[1, 32])
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    for clients in options.clients:
        for name, body in (("one token per event", {}), ("8 per event", {"stream_interval": 8})):
            found = microseconds_per_token(clients, tokens=options.tokens, **body)
            print(f"{clients} streams, {name}: {found:.0f} us per token", flush=True)


if __name__ == "__main__":
    main()
