"""The Grafana dashboard: every query is read, and its names are looked up in what an engine really exposes."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest
from engine_tools import run
from prometheus_client.parser import text_string_to_metric_families
from server_tools import NAME, byte_engine

from jaxserve import SamplingParams
from jaxserve.metrics import exposition

FILE = Path(__file__).parents[2] / "configs" / "grafana" / "jaxserve.json"
DASHBOARD = json.loads(FILE.read_text())
PANELS = DASHBOARD["panels"]
QUERIES = [(panel, target) for panel in PANELS for target in panel.get("targets", [])]

AGGREGATIONS = {"sum", "max"}
FUNCTIONS = AGGREGATIONS | {"rate", "increase", "histogram_quantile"}
OF_COUNTERS = {"rate", "increase"}
FROM_THE_SCRAPE = {"job", "instance"}  # labels that Prometheus adds
TOKEN = re.compile(r"\s*(\"(?:[^\"\\]|\\.)*\"|\$?[A-Za-z_:][\w:]*|\d+(?:\.\d+)?|=~|!=|!~|[=(){}\[\],/*+-])")


@pytest.fixture(scope="module")
def families():
    """Of an engine that speculates, after some requests: {name of a series: (its type, the names of its labels)}."""
    config = {"method": "ngram", "num_speculative_tokens": 3}
    with byte_engine(speculative_config=config) as engine:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        run(engine, [("abcabcabcabc", params), ("xyxyxyxyxy", params)])
        text = exposition(engine.figures(), NAME).decode()
    return {
        sample.name: (family.type, set(sample.labels))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Query:
    """A query of the kinds that the dashboard has: `series` are (metric, functions around it, its matchers' labels),
    `by` the labels that aggregations keep; ValueError for anything else."""

    def __init__(self, text):
        self.series, self.by, self._tokens = [], set(), []
        at = 0
        while at < len(text.rstrip()):
            found = TOKEN.match(text, at)
            if found is None:
                raise ValueError(f"{text[at:]!r} is no PromQL")
            self._tokens.append(found[1])
            at = found.end()
        self._expression(())
        if self._tokens:
            raise ValueError(f"{self._tokens} is left")

    def _next(self, *expected):
        token = self._tokens.pop(0) if self._tokens else None
        if token is None or (expected and token not in expected):
            raise ValueError(f"{token!r} instead of {expected}")
        return token

    def _peek(self):
        return self._tokens[0] if self._tokens else None

    def _expression(self, around):
        self._operand(around)
        while self._peek() in ("/", "*", "+", "-"):
            self._next()
            self._operand(around)

    def _operand(self, around):
        token = self._next()
        if token == "(":
            self._expression(around)
            self._next(")")
        elif token in FUNCTIONS:
            if token in AGGREGATIONS and self._peek() == "by":
                self._next()
                self.by |= set(self._list("(", ")"))
            self._arguments((*around, token))
        elif not re.fullmatch(r"\d+(\.\d+)?", token):
            self._selector(token, around)

    def _arguments(self, around):
        self._next("(")
        self._expression(around)
        while self._next(",", ")") == ",":
            self._expression(around)

    def _selector(self, name, around):
        labels = set()
        if self._peek() == "{":
            self._next()
            while True:
                labels.add(self._next())
                self._next("=", "=~", "!=", "!~")
                if not self._next().startswith('"'):
                    raise ValueError("a matcher's value is no string")
                if self._next(",", "}") == "}":
                    break
        over_time = self._peek() == "["
        if over_time:
            self._next()
            self._next("$__rate_interval")
            self._next("]")
        if over_time != bool(OF_COUNTERS & set(around[-1:])):
            raise ValueError(f"{name}: rates are of ranges, and nothing else is")
        self.series.append((name, around, labels))

    def _list(self, opening, closing):
        self._next(opening)
        found = [self._next()]
        while self._next(",", closing) == ",":
            found.append(self._next())
        return found


def test_the_queries_are_of_series_that_exist(families):
    assert len(QUERIES) > 40
    for panel, target in QUERIES:
        query = Query(target["expr"])
        assert query.series
        for name, around, labels in query.series:
            assert name in families, (panel["title"], name)
            kind, known = families[name]
            known = known | FROM_THE_SCRAPE
            assert labels <= known, (name, labels)
            assert query.by <= known, (name, query.by)
            counts = kind in ("counter", "histogram")
            assert counts == bool(OF_COUNTERS & set(around)), f"{name} is a {kind}"
            if "histogram_quantile" in around:
                assert name.endswith("_bucket")
                assert "le" in query.by
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert shown <= (query.by if AGGREGATIONS & set(around) else known)


def test_everything_that_is_measured_is_drawn(families):
    """But the parts of a sum that is drawn, and the process's constants."""
    drawn = {re.sub("_(bucket|sum|count)$", "", name) for _, t in QUERIES for name, _, _ in Query(t["expr"]).series}
    measured = {re.sub("_(bucket|sum|count)$", "", name) for name in families if name.startswith("jaxserve:")}
    left = {name for name in measured - drawn if not re.search(r"_created$|accepted_tokens_pos_\d", name)}
    assert left == {"jaxserve:request_inference_time_seconds", "jaxserve:spec_num_drafts_total"}


@pytest.mark.parametrize(
    "text",
    ["rate(a)", "a[$__rate_interval]", "sum by le (a)", "sum(a", "a b", "rate(a[5m])", "nothing(a)", "a{b=c}", "a;"],
)
def test_the_reader_of_queries_refuses(text):
    with pytest.raises(ValueError, match=r"."):
        Query(text)


def test_grafanas_schema():
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["title"]
    assert DASHBOARD["id"] is None  # Grafana gives one
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["type"] in ("row", "stat", "timeseries", "heatmap")
        box = panel["gridPos"]
        assert 0 <= box["x"] < box["x"] + box["w"] <= 24
        assert len({target["refId"] for target in panel.get("targets", [])}) == len(panel.get("targets", []))
    for one, other in combinations([panel["gridPos"] for panel in PANELS], 2):
        apart = any(
            a[at] + a[size] <= b[at] for a, b in ((one, other), (other, one)) for at, size in (("x", "w"), ("y", "h"))
        )
        assert apart, (one, other)


def test_the_data_source_and_the_filters_are_variables(families):
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    source = {"type": "prometheus", "uid": "${datasource}"}
    holders = [*(panel for panel in PANELS if panel["type"] != "row"), *(target for _, target in QUERIES)]
    for holder in [*holders, *(v for v in variables.values() if v["type"] == "query")]:
        assert holder["datasource"] == source
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS))) - {"__rate_interval"}
    assert used == set(variables)
    for variable in variables.values():
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variable["query"]["query"]).groups()
            assert label in families[name][1] | FROM_THE_SCRAPE
