"""Every PromQL expression of deploy/: dashboards, recording rules, alerts; and what each must fulfil."""

import dataclasses
import json
import re

import yaml

from harness.prometheus import DEPLOY, RULES

DASHBOARDS = DEPLOY / "grafana/dashboards"
# What Grafana puts in. The real $__rate_interval is four scrape intervals.
VARIABLES = {"$instance": ".*", "$__rate_interval": "10s"}
OF_PROMETHEUS = {"up"}


@dataclasses.dataclass(frozen=True)
class Query:
    source: str      # "overview.json", "rules.yml", "alerts.yml"
    title: str       # panel, recorded series, alert
    expression: str  # as it is evaluated
    labels: frozenset  # that every sample must carry, because a legend or an annotation uses them


def _fill_in(text):
    for name, value in VARIABLES.items():
        text = text.replace(name, value)
    return text


def from_dashboards():
    queries = []
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                labels = re.findall(r"{{(\w+)}}", target["legendFormat"])
                queries.append(Query(path.name, panel["title"], _fill_in(target["expr"]),
                                     frozenset(labels)))
    return queries


def _rules(name):
    return [rule for group in yaml.safe_load((RULES / name).read_text())["groups"]
            for rule in group["rules"]]


def recorded():
    return {rule["record"] for rule in _rules("rules.yml")}


def alert_names():
    return [rule["alert"] for rule in _rules("alerts.yml")]


def unfiltered(expression):
    """An alert's condition as numbers, so that it has samples while all is well: comparisons answer 0
    or 1 and drop nothing. They are written with spaces around them, unlike those of matchers."""
    return re.sub(r" (<|>|==|!=|<=|>=) ", r" \1 bool ", expression)


def from_rules():
    queries = [Query("rules.yml", r["record"], r["expr"], frozenset()) for r in _rules("rules.yml")]
    for rule in _rules("alerts.yml"):
        labels = re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))
        queries.append(Query("alerts.yml", rule["alert"], unfiltered(rule["expr"]),
                             frozenset(labels)))
    return queries


def metrics_of(expression):
    """Names of the series that an expression reads."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", expression)
    bare = re.sub(r"{[^}]*}", "", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right) *\([^)]*\)", "", bare)
    return set(re.findall(r"\b(?:attn_\w+|up|[a-z_]+:[\w:]+)", bare))


def grouping_of(expression):
    """Labels of the expression's own `by`, where it is one aggregation or a quotient of such."""
    match = re.match(r"\s*(?:histogram_quantile\([\d.]+,\s*)?sum by \(([^)]*)\)", expression)
    return {label.strip() for label in match.group(1).split(",")} - {"le"} if match else set()


def problems(query, prometheus, known):
    """What is wrong with a query; empty: nothing. `known`: names of the series that exist."""
    found = [f"there is no series {name}" for name in sorted(metrics_of(query.expression) - known)]
    try:
        samples = prometheus.query(query.expression)
    except ValueError as error:
        return found + [f"it does not evaluate: {error}"]
    if not samples:
        found.append("it has no sample")
    wanted = query.labels | grouping_of(query.expression)
    for labels, value in samples:
        missing = wanted - set(labels)
        if missing:
            found.append(f"a sample has no label {', '.join(sorted(missing))}")
            break
        if value != value:
            found.append(f"{labels} is not a number")
            break
    return found


def known_series(*expositions):
    return set().union(*(e.names() for e in expositions)) | recorded() | OF_PROMETHEUS


def all_recorded(prometheus):
    """Whether every recorded series has samples. Groups of rules are evaluated at different moments; the
    last to come is a quantile of what a rule has recorded, of the CPU and of two made-up GPUs."""
    return (all(prometheus.query(name) for name in recorded())
            and len(prometheus.query("instance_device:attn_roofline:median1d")) >= 3)
