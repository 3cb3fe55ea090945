"""Nothing that one client does harms another, and the server's ends are clean."""

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_tools import run
from server_tools import byte_engine, events, local_server

from jaxserve import SamplingParams
from jaxserve.server import connection

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "Hello", "temperature": 0, "max_tokens": 5, "ignore_eos": True}
ENDLESS = {"prompt": "Hello", "temperature": 0, "max_tokens": 500, "ignore_eos": True}


def waiting_until(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.002)


def raw(server, body, path=COMPLETIONS):
    """A connection on which the request has been sent and nothing is read."""
    sent = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    client.sendall(head.encode() + sent)
    return client


def slow(engine, seconds):
    """Make every step take at least so long, so that a test can act between two of them."""
    step = engine.step

    def slowed():
        time.sleep(seconds)
        return step()

    engine.step = slowed
    return engine


# ---- limits ---------------------------------------------------------------------------------------------


def test_bodies_that_are_too_large_are_not_read():
    with local_server(max_request_bytes=1000) as server:
        big = json.dumps({"prompt": "x" * 1000}).encode()
        headers = {"Content-Type": "application/json"}
        assert server.client.post(COMPLETIONS, content=big, headers=headers).status_code == 413
        pieces = (big[at : at + 100] for at in range(0, len(big), 100))  # chunked: nothing says how long it is
        response = server.client.post(COMPLETIONS, content=pieces, headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert server.post(COMPLETIONS, SHORT).status_code == 200


def test_a_long_queue_is_refused_with_a_time_to_come_again():
    engine = slow(byte_engine(max_num_seqs=8), 0.01)
    with local_server(engine, max_queued_requests=4) as server:
        with ThreadPoolExecutor(20) as pool:
            body = {**SHORT, "max_tokens": 30}
            responses = list(pool.map(lambda _: server.post(COMPLETIONS, body), range(20)))
        statuses = [response.status_code for response in responses]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 12
        refused = [response for response in responses if response.status_code == 429]
        assert {response.headers["retry-after"] for response in refused} == {"1"}
        assert {response.json()["error"]["type"] for response in refused} == {"rate_limit_error"}
        answers = {response.json()["choices"][0]["text"] for response in responses if response.status_code == 200}
        assert len(answers) == 1
        response = server.post(COMPLETIONS, {**SHORT, "n": 13, "temperature": 1})
        assert response.status_code == 400  # it could never be taken
        assert server.post(COMPLETIONS, SHORT).status_code == 200
        server.idle()


def test_keys(monkeypatch):
    monkeypatch.setenv("JAXSERVE_API_KEY", "from,environment")
    for keys, right in ((["first", "second"], ["first", "second"]), (None, ["from", "environment"])):
        with local_server(api_key=keys) as server:
            for path in ("/v1/models", "/v1/completions", "/tokenize", "/detokenize"):
                for header in (None, "Bearer wrong", "first", "Basic first", "Bearer", "Bearer first x", "Bearer \xe9"):
                    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
                    response = server.client.get(path, headers=headers)
                    assert response.status_code == 401, header
                    assert response.json()["error"]["code"] == "invalid_api_key"
                    assert response.headers["www-authenticate"] == "Bearer"
            for key in right:
                headers = {"Authorization": f"Bearer {key}"}
                assert server.client.get("/v1/models", headers=headers).status_code == 200
                assert server.post(COMPLETIONS, SHORT, headers=headers).status_code == 200
            assert server.client.get("/health").status_code == 200


def test_pages_of_other_origins_only_where_they_are_allowed():
    ask = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    with local_server() as server:
        assert "access-control-allow-origin" not in server.client.get("/health", headers=ask).headers
        assert server.client.options(COMPLETIONS, headers=ask).status_code == 405
    with local_server(allowed_origins="https://page.example") as server:
        allowed = server.client.options(COMPLETIONS, headers=ask)
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        other = server.client.get("/health", headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


# ---- time -----------------------------------------------------------------------------------------------


def test_a_request_that_takes_too_long_is_ended():
    with local_server(slow(byte_engine(), 0.02), request_timeout=0.4) as server:
        response = server.post(COMPLETIONS, ENDLESS)
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "timeout_error"
        assert response.headers["x-should-retry"] == "false"
        server.idle()
        text = server.post(COMPLETIONS, {**ENDLESS, "stream": True}).text
        *chunks, last, nothing = text.split("\n\n")
        assert nothing == ""
        assert len(chunks) > 2
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "timeout_error"
        server.idle()
        assert server.post(COMPLETIONS, SHORT).status_code == 200


def test_a_body_that_comes_too_slowly():
    with local_server(body_timeout=0.3) as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port)
        client.putrequest("POST", COMPLETIONS)
        client.putheader("Content-Type", "application/json")
        client.putheader("Content-Length", "100")
        client.endheaders(b'{"prompt"')
        response = client.getresponse()
        assert response.status == 408
        assert json.loads(response.read())["error"]["type"] == "timeout_error"
        client.close()


def test_a_head_that_comes_too_slowly_or_never_ends(monkeypatch):
    monkeypatch.setattr(connection, "HEADERS_SECONDS", 0.3)
    with local_server() as server:
        silent = socket.create_connection(("127.0.0.1", server.port))
        dripping = socket.create_connection(("127.0.0.1", server.port))
        dripping.sendall(b"GET /health HTTP/1.1\r\nX-A: ")
        endless = socket.create_connection(("127.0.0.1", server.port))
        endless.sendall(b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 200_000)
        for client in (endless, silent, dripping):
            client.settimeout(5)
            assert closed(client)
        assert server.client.get("/health").status_code == 200


def closed(client):
    try:
        return client.recv(100) == b""
    except ConnectionResetError:
        return True
    finally:
        client.close()


def test_who_does_not_read_is_cut_off_and_stops_nobody():
    """The stream of a client that reads nothing fills the socket's buffers; everyone else goes on."""
    body = {**ENDLESS, "n": 4, "temperature": 1, "logprobs": 0, "stream": True}
    with local_server(slow(byte_engine(), 0.02), request_timeout=6) as server:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the connections' too
        expected = server.post(COMPLETIONS, {**SHORT, "max_tokens": 30}).json()["choices"]
        server.post(COMPLETIONS, {**body, "max_tokens": 3})
        begun = time.monotonic()
        deaf = raw(server, body)
        waiting_until(lambda: server.engine.scheduler.running)
        while server.service.num_open:
            assert server.post(COMPLETIONS, {**SHORT, "max_tokens": 30}).json()["choices"] == expected
        assert 4 < time.monotonic() - begun < 15, "it was not the time-out that ended it"
        waiting_until(lambda: len(server.server.server_state.connections) == 1)  # the well-behaved client's
        server.idle()
        deaf.close()
        assert server.stats()["jaxserve:num_requests_running"] == 0


# ---- clients that go away -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", ["prefill", "decode", "queued"])
def test_a_client_that_goes_away_frees_its_pages_within_two_steps(state, stream):
    engine = slow(byte_engine(max_num_seqs=8, max_num_batched_tokens=16), 0.1)
    body = {**ENDLESS, "stream": stream, "prompt": "x" * (400 if state == "prefill" else 5)}
    with local_server(engine) as server:
        if state == "queued":
            others = [raw(server, {**ENDLESS, "prompt": "y"}) for _ in range(8)]
            waiting_until(lambda: len(engine.scheduler.running) == 8)
        client = raw(server, body)
        mine = lambda: (
            [r for r in held(engine) if r.prompt_token_ids[0] == engine.tokenizer.encode("x")[0]]
            or [r for r in held(engine) if r.num_prompt_tokens == 5]
        )
        waiting_until(lambda: [r for r in mine() if state_of(r) == state])
        steps = engine.stats()["steps"]
        client.close()
        waiting_until(lambda: not mine())
        assert engine.stats()["steps"] - steps <= 2
        if state == "queued":
            assert len(engine.scheduler.running) == 8
            for other in others:
                other.close()
        server.idle()


def held(engine):
    return [*engine.scheduler.running, *engine.scheduler.waiting, *engine.scheduler.preempted]


def state_of(request):
    if request.num_admissions == 0:
        return "queued"
    return "prefill" if request.num_computed < request.num_prompt_tokens else "decode"


def test_many_leave_at_random_and_the_others_get_their_answers():
    texts = [f"prompt {index}" for index in range(24)]
    body = lambda text: {"prompt": text, "max_tokens": 40, "temperature": 0.8, "seed": 1, "ignore_eos": True}
    with byte_engine() as engine:
        sampling = SamplingParams(max_tokens=40, temperature=0.8, seed=1, ignore_eos=True)
        expected = [result.outputs[0].text for result in run(engine, [(text, sampling) for text in texts])]
    with local_server(byte_engine(num_pages=48)) as server:  # too few for all at once: they are preempted
        leaving = threading.Event()

        def leave(number):
            while not leaving.is_set():
                client = raw(server, {**body(f"leaving {number}"), "stream": bool(number % 2)})
                time.sleep(0.05 * (1 + number))
                client.close()

        with ThreadPoolExecutor(30) as pool:
            gone = [pool.submit(leave, number) for number in range(6)]
            answers = list(pool.map(lambda text: server.post(COMPLETIONS, body(text)).json(), texts))
            leaving.set()
            for one in gone:
                one.result()
        assert [answer["choices"][0]["text"] for answer in answers] == expected
        server.idle()


def test_a_long_text_holds_nobody_up(server):
    """Tokenisers work for seconds on megabytes; meanwhile other requests are answered."""
    text = "some words " * 40_000
    with ThreadPoolExecutor(1) as pool:
        tokenised = pool.submit(lambda: server.post("/tokenize", {"prompt": text}))
        longest = 0.0
        while not tokenised.done():
            begun = time.monotonic()
            assert server.client.get("/health").status_code == 200
            longest = max(longest, time.monotonic() - begun)
            time.sleep(0.01)
    assert tokenised.result().json()["count"] == len(text)
    assert longest < 2  # parsing it holds everybody up for a moment


# ---- the engine's end -----------------------------------------------------------------------------------


def test_when_the_engine_fails_everybody_is_told_and_the_server_ends(caplog):
    engine = byte_engine()
    dispatch, failing = engine.runner.compute, threading.Event()

    def maybe(*arguments, **options):
        if failing.is_set():
            raise MemoryError("the device is gone")
        return dispatch(*arguments, **options)

    engine.runner.compute = maybe
    with local_server(slow(engine, 0.01)) as server, ThreadPoolExecutor(4) as pool:
        whole = pool.submit(server.post, COMPLETIONS, ENDLESS)
        streamed = pool.submit(server.post, COMPLETIONS, {**ENDLESS, "stream": True})
        # A stream that has no token yet has not begun: it would end with a status, not with an event.
        waiting_until(lambda: [len(request.output_token_ids) > 3 for request in engine.scheduler.running] == [True] * 2)
        failing.set()
        assert whole.result().status_code == 500
        assert "the device is gone" in whole.result().json()["error"]["message"]
        last = streamed.result().text.split("\n\n")[-2]
        assert "the device is gone" in json.loads(last.removeprefix("data: "))["error"]["message"]
        waiting_until(lambda: server.service.status == "failed")
        health = server.client.get("/health")
        assert health.status_code == 503
        assert "the device is gone" in health.json()["error"]
        assert server.post(COMPLETIONS, SHORT).status_code == 503
        waiting_until(lambda: not server._thread.is_alive())  # by itself
    assert server.service.error is not None
    assert "the engine has ended: MemoryError: the device is gone" in caplog.text


def test_one_request_that_fails_is_told_alone():
    """Its activations are no numbers."""
    engine = byte_engine()
    complete = engine.scheduler.complete
    engine.scheduler.complete = lambda entry, token, finite: complete(
        entry, token, finite and entry.request.num_prompt_tokens != 7
    )
    with local_server(engine) as server:
        bad = {**SHORT, "prompt": "seven77"}
        with ThreadPoolExecutor(2) as pool:
            answers = list(
                pool.map(lambda body: server.post(COMPLETIONS, body), [SHORT, bad, SHORT, {**bad, "stream": True}])
            )
        assert [answer.status_code for answer in answers] == [200, 500, 200, 500]
        assert "not finite" in answers[1].json()["error"]["message"]
        server.idle()


def test_a_stop_lets_running_requests_end_and_takes_no_more():
    with local_server(slow(byte_engine(), 0.01)) as server, ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.post, COMPLETIONS, {**SHORT, "max_tokens": 50, "stream": True})
        waiting_until(lambda: server.engine.stats()["generation_tokens"] > 3)
        server.server._on_signal(15, None)
        waiting_until(lambda: not server._thread.is_alive())
        assert len(events(running.result())) >= 2
        assert server.service.error is None


def test_a_stop_does_not_wait_for_ever():
    with local_server(slow(byte_engine(), 0.02), shutdown_timeout=0.3) as server, ThreadPoolExecutor(2) as pool:
        whole = pool.submit(server.post, COMPLETIONS, ENDLESS)
        streamed = pool.submit(server.post, COMPLETIONS, {**ENDLESS, "stream": True})
        running = server.engine.scheduler.running
        # A stream that has no token yet has not begun: it would end with a status, not with an event.
        waiting_until(lambda: [len(request.output_token_ids) > 1 for request in running] == [True, True])
        server.server._on_signal(15, None)
        assert whole.result().status_code == 503
        last = json.loads(streamed.result().text.split("\n\n")[-2].removeprefix("data: "))
        assert last["error"]["type"] == "service_unavailable"
        waiting_until(lambda: not server._thread.is_alive())
