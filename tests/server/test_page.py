"""The page at `/` as it is served; what it does in a browser stands in test_page_browser.py."""

import re
from html.parser import HTMLParser
from importlib.resources import files
from urllib.parse import urljoin

import pytest
from server_tools import byte_engine, local_server, metrics

PAGE = files("jaxserve.server").joinpath("page")
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.fixture(scope="module")
def kept():
    """A server that asks for a key."""
    with local_server(byte_engine(), api_key="secret") as server:
        yield server


class References(HTMLParser):
    """What a page refers to, its elements by id, and whether it holds code or styles of its own."""

    def __init__(self, text):
        super().__init__()
        self.found, self.ids, self.inline = set(), {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.found |= {attributes[name] for name in ("src", "href", "action") if name in attributes}
        self.inline += [name for name in attributes if name == "style" or name.startswith("on")]
        self.inline += [tag] if tag in ("script", "style") and "src" not in attributes else []
        if "id" in attributes:
            assert attributes["id"] not in self.ids
            self.ids[attributes["id"]] = (tag, attributes)


def test_the_page_and_its_files_need_no_key(kept):
    page = kept.client.get("/")
    assert page.status_code == 200
    wanted = {"/"} | {urljoin("/", reference) for reference in REFERENCES.found}
    for script in (file for file in PAGE.iterdir() if file.name.endswith(".js")):
        wanted |= {urljoin("/page/", name) for name in re.findall(r'from "(.*?)"', script.read_text())}
    assert {"/page/style.css", "/page/main.js", "/page/prometheus.js"} < wanted
    for path in wanted:
        response = kept.client.get(path)
        name = "index.html" if path == "/" else path.removeprefix("/page/")
        assert response.content == PAGE.joinpath(name).read_bytes()
        assert response.headers["content-type"] == f"{TYPES[name.rpartition('.')[2]]}" + (
            "; charset=utf-8" if not name.endswith("svg") else ""
        )
    assert len(wanted) == len(list(PAGE.iterdir())), "a file that nobody asks for"
    assert kept.client.get("/v1/models").status_code == 401


def test_its_headers_forbid_everything_from_outside(kept):
    for path in ("/", "/page/main.js"):
        headers = kept.client.get(path).headers
        rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert rules["default-src"] == "'none'"
        assert set(rules.values()) == {"'none'", "'self'"}
        assert headers["x-content-type-options"] == "nosniff"


def test_a_browser_that_has_a_file_is_told_so(kept):
    first = kept.client.get("/page/style.css")
    again = kept.client.get("/page/style.css", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = kept.client.get("/page/style.css", headers={"If-None-Match": '"other"'})
    assert (other.status_code, other.content) == (200, first.content)


def test_nothing_else_is_served(kept):
    for name in ("", "none.js", "index.html", "..%2Fapp.py", "../app.py", "/main.js"):
        assert kept.client.get(f"/page/{name}").status_code == 404, name
    assert kept.client.post("/", json={}).status_code == 405


def test_it_refers_to_nothing_outside_and_makes_no_markup_of_text():
    assert REFERENCES.inline == []
    for file in PAGE.iterdir():
        text = file.read_text()
        urls = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text))
        assert urls <= {"http://www.w3.org/2000/svg"}, file.name  # a name that nobody fetches
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "@import", "url("):
            assert word not in text, (file.name, word)


def test_the_elements_that_scripts_use_exist():
    used = set()
    for file in PAGE.iterdir():
        if file.name.endswith(".js"):
            text = file.read_text()
            used |= set(re.findall(r"nodes\.(\w+)", text)) | set(re.findall(r'nodes\["([\w-]+)"\]', text))
    assert len(used) > 15
    assert used <= set(REFERENCES.ids)


def test_its_metrics_exist_with_their_types(kept):
    """After one request, every figure that the page draws is there."""
    headers = {"Authorization": "Bearer secret"}
    body = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
    assert kept.post("/v1/completions", body, headers=headers).status_code == 200
    kept.idle()
    names = set(re.findall(r'"(jaxserve:\w+)"', PAGE.joinpath("figures.js").read_text()))
    assert len(names) >= 10
    assert names <= {name.partition("{")[0] for name in metrics(kept.client)}
    assert 'num_pages="' in kept.client.get("/metrics").text


REFERENCES = References(PAGE.joinpath("index.html").read_text())
