"""The page at `/` as people use it, in headless Chromium: skipped where Playwright or Chromium is not installed."""

import json
import re
import threading
import time
from math import inf

import httpx
import pytest
from browser import chromium
from checkpoint_tools import SHAPES, write_tiny_checkpoint
from server_tools import ServerProcess, byte_engine, local_server, metrics

pytestmark = pytest.mark.slow
KEY = "secret"
CHAT = "**/v1/chat/completions"
ANSWERED = ".message.assistant:not(.writing) .note:not(:empty)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as context:
        yield context


@pytest.fixture
def page(browser):
    """A new tab, in which nothing may go wrong by itself."""
    page, wrong = browser.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if "Content Security" in message.text else None)
    yield page
    page.close()
    assert wrong == []


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A server process that is still loading its model, with a key."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("page") / "model")
    options = [part for name, value in {"model": folder, **SHAPES}.items() for part in (f"--{name}", str(value))]
    server = ServerProcess(*options, "--api-key", KEY, "--served-model-name", "tiny", ready=False)
    yield server
    server.close()


@pytest.fixture(scope="module")
def slow():
    """A server whose steps take long enough to act between them: two requests at once, and none may wait."""
    engine = byte_engine(max_num_seqs=2)
    step = engine.step

    def slowed():
        time.sleep(0.02)
        return step()

    engine.step = slowed
    with local_server(engine, max_queued_requests=0) as server:
        yield server


def say(page, text):
    page.fill("#input", text)
    page.press("#input", "Enter")


def texts(page, role):
    return [node.text_content() for node in page.query_selector_all(f".message.{role} .text")]


def change(page, **fields):
    """The page's questions reach the server with more fields, which the page does not know of."""

    def send_on(route):
        route.continue_(post_data=json.dumps(json.loads(route.request.post_data) | fields))

    page.route(CHAT, send_on)


def bodies(page):
    """What the page sends, as it is sent."""
    sent = []
    page.on("request", lambda r: sent.append(json.loads(r.post_data)) if r.url.endswith("/completions") else None)
    return sent


def test_from_loading_to_a_conversation(page, started):
    """The server's start in words, a key, a streamed answer, the same again, another turn, and a new chat."""
    page.goto(started.url)
    assert re.match("The model is being loaded|Programs are being compiled", page.text_content("#starting-text"))
    assert page.is_visible("#starting-progress")
    page.fill("[name=key]", KEY)
    say(page, "Too early")
    page.wait_for_selector("#problem:visible")
    assert re.search("being (loaded|compiled)", page.text_content("#problem"))
    page.fill("[name=key]", "wrong")
    page.wait_for_selector("#status[data-state=ready]", timeout=120_000)
    assert not page.is_visible("#starting")

    page.click("#again")
    page.wait_for_selector("#problem:has-text('API key')")
    assert page.evaluate("document.activeElement.name") == "key"
    page.fill("[name=key]", KEY)
    page.fill("[name=system]", "Be brief.")
    for name, value in (("temperature", "1.5"), ("seed", "7"), ("max_tokens", "12"), ("top_p", "0.9")):
        page.fill(f"[name={name}]", value)
    sent = bodies(page)
    page.click("#new")
    say(page, "Hello")
    page.wait_for_selector(ANSWERED)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    given = {"messages": messages, "temperature": 1.5, "seed": 7, "max_tokens": 12, "top_p": 0.9}
    assert sent[0] == {**given, "stream": True, "stream_options": {"include_usage": True}}
    asked = started.client.post("/v1/chat/completions", json=given, headers={"Authorization": f"Bearer {KEY}"}).json()
    answer = asked["choices"][0]["message"]["content"]
    assert texts(page, "assistant") == [answer]
    note = page.text_content(ANSWERED)
    assert f"{asked['usage']['completion_tokens']} token" in note
    assert ("cut at the greatest length" in note) == (asked["choices"][0]["finish_reason"] == "length")

    page.click("#again")
    page.wait_for_selector(ANSWERED)
    assert texts(page, "assistant") == [answer]  # the same seed
    assert sent[1] == sent[0]
    say(page, "And?")
    page.wait_for_selector(f".message:nth-child(4) {ANSWERED.partition(' ')[2]}")
    turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}]
    assert sent[2]["messages"] == [*messages, *turns]
    page.click("#new")
    assert page.query_selector_all(".message") == []
    assert page.is_visible("#empty")


def test_the_figures_are_those_of_the_engine(page, started):
    page.goto(started.url)
    page.wait_for_selector("#status[data-state=ready]", timeout=120_000)
    assert page.text_content("#model") == "tiny"
    body = {"prompt": "Hello", "max_tokens": 60, "n": 4, "temperature": 1, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    page.wait_for_selector(".chart")
    page.wait_for_timeout(1200)  # the readings before and after differ by these requests
    for _ in range(3):
        started.client.post("/v1/completions", json=body, headers=headers)
    found = metrics(started.client)
    generated = f"{int(found['jaxserve:generation_tokens_total']):,}"
    page.wait_for_selector(f"#totals dd:text-is('{generated}')")
    labels = {label.partition(":")[0]: label for label in page.eval_on_selector_all(".chart svg", LABELS)}
    assert list(labels) == ["Requests", "Pages", "Tokens per second", "Time to first token", "Time between tokens"]
    assert labels["Requests"] == "Requests: running 0, waiting 0"
    assert labels["Pages"] == "Pages: used 0 of 32"
    speed = float(re.search(r"generated ([\d.]+)", labels["Tokens per second"])[1])
    assert 3 * 4 * 60 / 6 < speed < 3 * 4 * 60  # within the seconds of a rate
    for name in ("Time to first token", "Time between tokens"):
        assert re.search(r"p50 [\d.]+ m?s, p99 [\d.]+ m?s", labels[name])
    assert len(page.get_attribute(".chart .line", "d")) > 10


LABELS = "nodes => nodes.map((node) => node.getAttribute('aria-label'))"


def test_quantiles_of_histograms(page, started):
    """By hand, as PromQL defines them: linear within the bucket in which the rank lies."""
    page.goto(started.url)
    ask = "([share, pairs]) => import('/page/prometheus.js').then((m) => m.quantile(share, pairs))"
    cumulative = [[1, 4], [2, 8], [4, 10], [inf, 12]]
    for share, right in ((0.5, 1.5), (0.25, 0.75), (0.75, 3.0), (0.99, 4.0)):
        assert page.evaluate(ask, [share, cumulative]) == pytest.approx(right)
    assert page.evaluate(ask, [0.5, [[1, 0], [inf, 0]]]) is None
    text = 'a{le="0.5",m="x\\"}"} 3\na{le="+Inf",m="x\\"}"} 7\n# a 1\nb 2.5\n'
    read = "(text) => import('/page/prometheus.js').then((m) => [m.buckets(m.parse(text), 'a'), m.parse(text).b])"
    assert page.evaluate(read, text) == [[[0.5, 3], [inf, 7]], [{"labels": {}, "value": 2.5}]]


def test_markup_of_the_model_is_text(page, slow):
    """The real server is made to answer with markup."""
    markup = "<img src=x onerror=alert(1)><b>bold</b>&amp;"
    page.on("dialog", lambda dialog: pytest.fail("the answer has run"))
    change(page, structured_outputs={"choice": [markup]})
    page.goto(slow.url)
    page.wait_for_selector("#status[data-state=ready]")
    say(page, "<i>me</i>")
    page.wait_for_selector(ANSWERED)
    assert texts(page, "assistant") == [markup]
    assert texts(page, "user") == ["<i>me</i>"]
    assert page.query_selector_all("#log img, #log b, #log i") == []


def test_escape_stops_and_the_next_answer_goes_on(page, slow):
    change(page, ignore_eos=True)  # 400 tokens of 20 ms and more: no answer ends before it is stopped
    page.goto(slow.url)
    page.fill("[name=max_tokens]", "400")
    page.fill("[name=seed]", "1")
    sent = bodies(page)
    page.fill("#input", "first")
    page.press("#input", "Shift+Enter")
    page.keyboard.type("second")
    page.keyboard.press("Enter")
    page.wait_for_selector(".writing .text:not(:empty)")
    assert page.get_attribute("#log", "aria-busy") == "true"
    assert page.is_visible("#stop")
    assert not page.is_visible("#send")
    page.keyboard.press("Escape")
    page.wait_for_selector(".note:has-text('stopped')")
    slow.idle()  # the engine has been told
    assert page.get_attribute("#log", "aria-busy") == "false"
    assert page.is_visible("#send")
    assert sent[0]["messages"] == [{"role": "user", "content": "first\nsecond"}]
    kept = texts(page, "assistant")[0]
    assert kept
    page.fill("[name=max_tokens]", "3")
    say(page, "third")
    page.wait_for_selector(".message.assistant:nth-child(4) .note:has-text('token')")
    assert [message["content"] for message in sent[1]["messages"]] == ["first\nsecond", kept, "third"]
    page.fill("[name=max_tokens]", "400")
    page.click("#again")
    page.wait_for_selector("#stop:visible")
    page.click("#stop")
    page.wait_for_selector(".message:nth-child(4) .note:has-text('stopped')")
    slow.idle()


def test_what_goes_wrong_is_said(page, slow):
    page.goto(slow.url)
    page.fill("[name=temperature]", "7")
    say(page, "Hello")
    page.wait_for_selector("#problem:has-text('Temperature: ')")
    page.fill("[name=temperature]", "")
    page.fill("[name=seed]", str(2**70))
    page.click("#again")
    page.wait_for_selector("#problem:has-text('refuses this: seed')")
    page.fill("[name=seed]", "")
    page.fill("[name=max_tokens]", "3")
    body = {"prompt": "x", "n": 2, "temperature": 1, "max_tokens": 400, "ignore_eos": True}
    busy = threading.Thread(target=lambda: httpx.post(slow.url + "/v1/completions", json=body, timeout=60))
    busy.start()
    while slow.service.num_open < 2:
        time.sleep(0.005)
    page.click("#again")
    page.wait_for_selector("#problem:has-text('The server is busy: 2 answers are under way')")
    assert texts(page, "user") == ["Hello"]
    slow.service.end_requests()
    busy.join()
    slow.idle()
    page.click("#again")
    page.wait_for_selector(ANSWERED)
    assert not page.is_visible("#problem")
    page.context.set_offline(True)
    page.click("#again")
    page.wait_for_selector("#problem:has-text('does not answer')")
    page.wait_for_selector("#status[data-state=gone]")
    page.context.set_offline(False)
    page.wait_for_selector("#status[data-state=ready]")


def test_everything_is_reached_by_keyboard_and_has_a_name(page, slow):
    page.goto(slow.url)
    page.wait_for_selector("#status[data-state=ready]")
    controls = page.query_selector_all("button:visible:not(:disabled), input:visible, textarea:visible")
    reached = set()
    for _ in range(len(controls) + 5):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(FOCUSED)
        reached.add(name)
        # The composer's frame shows where its text field has the focus.
        assert outline != "none" or name in ("input", "BODY")
    assert {control.get_attribute("name") or control.get_attribute("id") for control in controls} <= reached
    for field in page.query_selector_all("input, textarea"):
        assert field.evaluate("(node) => node.labels.length") == 1


FOCUSED = """() => {
  const node = document.activeElement;
  return [node.name || node.id || node.tagName, getComputedStyle(node).outlineStyle];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_and_in_both_schemes(page, slow, scheme):
    change(page, ignore_eos=True)
    page.set_viewport_size({"width": 360, "height": 640})
    page.emulate_media(color_scheme=scheme)
    page.goto(slow.url)
    page.wait_for_selector(".chart", state="attached")
    say(page, "A_word_without_any_space_" * 4)
    page.wait_for_selector("#stop:visible")
    page.keyboard.press("Escape")
    for view in ("chat", "parameters", "engine"):
        page.click(f"nav button[data-view={view}]")
        assert [s for s in ("chat", "parameters", "engine") if page.is_visible(f"#{s}")] == [view]
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        for node in page.query_selector_all("button:visible, input:visible"):
            box = node.bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360
            assert box["height"] >= 36
    page.click("nav button[data-view=chat]")
    for selector in ("#send", ".message.user .text", "#new", "#keys", ".who", "nav button[aria-pressed=true]"):
        assert page.eval_on_selector(selector, CONTRAST) >= 4.5, selector
    slow.idle()


# Of the text's colour and the nearest background, as WCAG defines it.
CONTRAST = """(node) => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => parts(color).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, index) => sum + c * [0.2126, 0.7152, 0.0722][index], 0);
  const text = light(getComputedStyle(node).color);
  while ((parts(getComputedStyle(node).backgroundColor)[3] ?? 1) === 0) node = node.parentElement;
  const back = light(getComputedStyle(node).backgroundColor);
  return (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
}"""
