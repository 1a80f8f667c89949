"""docs/configuration.md says what the settings say; docs/metrics.md, grafana.json and alerts.yaml what is exported."""

import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml

from local_runner.checks import READERS
from scripts import reference
from trainer.reporting import metrics as trainer_metrics

# Of prometheus_client itself, wherever there is /proc, of Prometheus, and of Kubernetes' kubelets.
VOLUME = dict.fromkeys(("kubelet_volume_stats_available_bytes", "kubelet_volume_stats_capacity_bytes"), "gauge")
CPU = {"process_cpu_seconds_total": "counter"}
PROCESS = CPU | {"process_resident_memory_bytes": "gauge", "up": "gauge"} | VOLUME
SUFFIXES = ("_bucket", "_sum", "_count")
DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "grafana.json").read_text())
PANELS = DASHBOARD["panels"]
RULES = [rule for group in yaml.safe_load((DOCS / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
# Labels that docs/cluster/prometheus.yaml gives to the targets of a job group.
OF_A_POD = {"user", "run"}


@pytest.fixture(scope="module")
def metrics():
    return reference.exported()


def test_the_pages_are_what_the_code_says():
    assert reference.main(["--check"]) == 0


def test_every_settings_class_has_a_table_and_every_setting_is_explained():
    sources = [path for part in ("services", "trainer", "evaluation") for path in (DOCS.parent / part).rglob("*.py")]
    found = [
        class_
        for path in sources
        for class_ in re.findall(r"^class (\w+(?:Settings|Section))\(([^)]*)\)", path.read_text(), re.M)
    ]
    bases = {base for _, listed in found for base in re.findall(r"\w+", listed)}
    assert {reader.name for reader in READERS} == {name for name, _ in found} - bases
    for reader in READERS:
        for field, information in reader.settings_class().model_fields.items():
            assert information.description, f"{reader.name}.{field}"


def test_check_finds_a_page_that_is_out_of_date(tmp_path, monkeypatch, capsys):
    page = tmp_path / "configuration.md"
    page.write_text("Written by hand.\n\n## Old tables\n")
    monkeypatch.setattr(reference, "PAGES", {page: reference.settings_tables})
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    assert page.read_text().startswith("Written by hand.\n\n## All components\n")
    page.write_text(page.read_text().replace("| `MAX_STEPS` | `0` |", "| `MAX_STEPS` | `7` |"))
    assert reference.main(["--check"]) == 1
    assert "make docs" in capsys.readouterr().err


def test_names_follow_the_conventions(metrics):
    for name, metric in metrics.items():
        # SGLang's own names have a colon.
        assert re.fullmatch(r"(sglang:)?[a-z][a-z0-9]*(_[a-z0-9]+)+", name), name
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert not name.endswith(SUFFIXES), name
        assert metric.help.endswith("."), name
        assert metric.kind in {"counter", "gauge", "histogram"}, name
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mib|percent)(_|$)", name), name


def test_columns_of_a_step_reach_their_metrics(metrics):
    for measure in trainer_metrics.MEASURES:
        assert set(metrics[measure.name].labels) == set(measure.labels), measure.column
    assert metrics["trainer_samples_ratio"].labels == ("measure", "k")
    assert metrics["trainer_reward_part_mean"].labels == ("function",)
    assert metrics["trainer_episodes_failed_total"].labels == ("reason",)


def selectors(node, inside=None):
    """Yield the names that an expression selects, each with the function whose direct argument it is."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node.name, inside
    elif isinstance(node, promql_parser.MatrixSelector):
        yield from selectors(node.vector_selector, inside)
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from selectors(argument, node.func.name)
    elif isinstance(node, promql_parser.AggregateExpr):
        yield from selectors(node.expr, inside)
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from selectors(node.lhs, inside)
        yield from selectors(node.rhs, inside)
    elif isinstance(node, promql_parser.ParenExpr):
        yield from selectors(node.expr, inside)
    else:
        assert isinstance(node, promql_parser.NumberLiteral), node


def asked_labels(metrics, title, expression):
    """Return the labels of the metrics that an expression asks for, after checking their names and kinds."""
    kinds = {name: metric.kind for name, metric in metrics.items()} | PROCESS
    kinds |= {name + suffix: "counter" for name, kind in kinds.items() if kind == "histogram" for suffix in SUFFIXES}
    found = list(selectors(promql_parser.parse(expression)))
    assert found
    for name, function in found:
        assert name in kinds, f"{title}: {name} is not exported"
        assert (function == "rate") == (kinds[name] == "counter"), f"{title}: {name} is a {kinds[name]}"
    asked = {name.removesuffix(suffix) for name, _ in found for suffix in ("", *SUFFIXES)}
    labels = {label for name in asked & set(metrics) for label in metrics[name].labels}
    return labels | {"service", "instance", "job"} | ({"persistentvolumeclaim"} if asked & VOLUME.keys() else set())


TARGETS = [(panel["title"], target) for panel in PANELS for target in panel.get("targets", [])]


def test_the_dashboard_asks_for_what_is_exported_by_its_kind(metrics):
    for title, target in TARGETS:
        labels = asked_labels(metrics, title, target["expr"].replace("$__rate_interval", "1m"))
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels | OF_A_POD, title


def test_the_dashboard_shows_the_chosen_runs_alone_and_tells_them_apart():
    for title, target in TARGETS:
        chosen = re.findall(r"{[^}]*}", target["expr"])
        parsed = promql_parser.parse(target["expr"].replace("$__rate_interval", "1m"))
        assert len(chosen) == len(list(selectors(parsed))), title
        assert all('namespace=~"$namespace"' in one for one in chosen), title
        # Evaluation heads and environment servers are no tasks of a run.
        is_of_a_run = not re.match(r".*(head|environment)[_-]", target["expr"])
        assert all(('run=~"$run"' in one) == is_of_a_run for one in chosen), title
        kept = [set(labels.split(", ")) for labels in re.findall(r" by \(([^)]*)\)", target["expr"])]
        if is_of_a_run and "{{instance}}" in target["legendFormat"]:
            assert all("instance" in labels for labels in kept), title
        elif is_of_a_run:
            # Two users may have jobs of the same number.
            assert target["legendFormat"].startswith("{{user}} {{run}} "), title
            assert all({"user", "run"} <= labels for labels in kept), title
            assert len(kept) == len(re.findall(r"\bsum\b", target["expr"])), title


def test_the_dashboards_variables_take_what_prometheus_labels_and_any_by_default():
    found = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert set(found) == {"source", "namespace", "run"}
    for name in ("namespace", "run"):
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", found[name]["query"])
        assert asked[2] == name
        promql_parser.parse(asked[1])
        # ".*" also takes series without the label: those of a run on one machine.
        assert (found[name]["includeAll"], found[name]["allValue"], found[name]["current"]["value"]) == (
            True,
            ".*",
            "$__all",
        )


def test_an_alert_asks_for_what_is_exported_by_its_kind(metrics):
    for rule in RULES:
        labels = asked_labels(metrics, rule["alert"], rule["expr"])
        of_a_run = re.search(r"trainer_|job=~?\"grpo", rule["expr"]) is not None
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert named - OF_A_POD <= labels, rule["alert"]
        assert named & OF_A_POD == (OF_A_POD if of_a_run else set()), rule["alert"]
        assert rule["labels"]["severity"] in {"warning", "critical"}, rule["alert"]
        assert re.fullmatch(r"\d+m", rule["for"]), rule["alert"]
