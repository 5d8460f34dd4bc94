"""The alerts and the dashboard ask for metrics that exist, say what to do, and reach the cluster as they are."""

import json
import re
from typing import Any

import pytest
import yaml

from tests.chart.helm import CHART, FULL_NAME, REPOSITORY, Helm, Object, Refused, named, nested, of_kind
from tests.chart.queries import TARGET_LABELS, Exported

GROUPS = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
ALERTS: list[Object] = [rule for group in GROUPS for rule in group["rules"]]
DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
ROWS = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GUIDE = (REPOSITORY / "docs" / "metrics.md").read_text()

each_alert = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
each_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
each_target = pytest.mark.parametrize(
    "target", [target for _, target in TARGETS], ids=[f"{title} {target['refId']}" for title, target in TARGETS]
)


@pytest.fixture(scope="module")
def exported() -> Exported:
    return Exported.now()


@pytest.mark.parametrize(
    ("query", "mistake"),
    [
        ("sum(rate(tpujob_restarts_total[5m])", "unclosed left parenthesis"),
        ("rate(tpujob_restarts_total)", "expected type matrix"),
        ("rate(tpujob_restart_total[5m])", "no metric tpujob_restart_total"),
        ("tpujob_recovery_seconds", "no metric tpujob_recovery_seconds"),
        ('tpujob_jobs{phase="Running"}', "tpujob_jobs has no label phase"),
        ('tpujob_jobs{state="Runing"}', "tpujob_jobs has no state Runing"),
        ('tpujob_jobs{state=~"Running|Waiting"}', "tpujob_jobs has no state Waiting"),
        ('rest_client_requests_total{code=~"6.."}', "rest_client_requests_total has no code 6.."),
        ("sum by (class) (tpujob_jobs)", "grouped by class, which nothing there has"),
    ],
)
def test_a_query_that_can_never_match_is_found(exported: Exported, query: str, mistake: str) -> None:
    assert mistake in " ".join(exported.mistakes(query))


# Alerts


@each_alert
def test_an_alert_queries_existing_metrics(exported: Exported, alert: Object) -> None:
    assert exported.mistakes(alert["expr"]) == []


@each_alert
def test_an_alert_has_a_severity(alert: Object) -> None:
    assert alert["labels"].keys() == {"severity"}
    assert alert["labels"]["severity"] in ("warning", "critical")


@each_alert
def test_an_alert_says_what_has_happened(exported: Exported, alert: Object) -> None:
    """The summary is the same for every instance; the description may use labels that the result has."""
    assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert "{{" not in alert["annotations"]["summary"]
    used = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["description"]))
    assert used <= exported.result_labels(alert["expr"])


@each_alert
def test_an_alert_links_to_what_to_do(alert: Object) -> None:
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert page == "docs/metrics.md"
    assert anchor in {heading.lower() for heading in re.findall(r"^### (\w+)$", GUIDE, re.MULTILINE)}


def test_every_alert_in_the_guide_exists() -> None:
    assert re.findall(r"^### (\w+)$", GUIDE, re.MULTILINE) == [alert["alert"] for alert in ALERTS]


@each_alert
def test_an_alert_selects_this_operator_only(alert: Object) -> None:
    """Other programs use the metric names of controller-runtime and client-go, too."""
    shared = re.findall(r"(controller_runtime_\w+|workqueue_\w+|leader_election_\w+)\{([^}]*)\}", alert["expr"])
    assert [name for name, matchers in shared if '"tputrainingjob"' not in matchers] == []
    if "rest_client_" in alert["expr"]:
        assert "and on (job, instance) tpujob_build_info" in alert["expr"]


def test_the_alerts_reach_the_cluster_unchanged(helm: Helm) -> None:
    """Helm leaves Prometheus' own templates alone. Only the link differs: a relative one leads nowhere there."""
    for value, kind in (("prometheusRule", "PrometheusRule"), ("rules", "Rules")):
        given = {"metrics": {value: {"enabled": True}, "runbookURL": "https://wiki/docs/metrics.md"}}
        rendered = named(helm.template(given), kind)
        assert json.loads(json.dumps(rendered["spec"]).replace("https://wiki/", "")) == {"groups": GROUPS}


def test_without_a_url_the_alerts_have_no_link(helm: Helm) -> None:
    rendered = named(helm.template(nested("metrics.rules.enabled", True)), "Rules")
    rules = [rule for group in rendered["spec"]["groups"] for rule in group["rules"]]
    assert [rule["alert"] for rule in rules] == [alert["alert"] for alert in ALERTS]
    assert {key for rule in rules for key in rule["annotations"]} == {"summary", "description"}


# The dashboard


def on(panel: Object) -> set[tuple[int, int]]:
    """The cells of the grid that the panel covers."""
    place = panel["gridPos"]
    return {
        (x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    }


@each_target
def test_a_panel_queries_existing_metrics(exported: Exported, target: Object) -> None:
    assert exported.mistakes(without_variables(target["expr"])) == []


@each_target
def test_a_panel_selects_this_operator_only(target: Object) -> None:
    """Every selector is limited to the chosen scrape jobs."""
    selectors = re.findall(
        r"\b(?:tpujob|controller_runtime|workqueue|rest_client|process|leader_election)_\w+(\{[^}]*\})?", target["expr"]
    )
    assert [one for one in selectors if one and 'job=~"$job"' not in one] == []
    assert any(selectors)


@each_target
def test_a_legend_uses_labels_that_the_result_has(exported: Exported, target: Object) -> None:
    used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    assert used <= exported.result_labels(without_variables(target["expr"]))


@each_panel
def test_a_panel_says_what_it_shows(panel: Object) -> None:
    assert panel["title"]
    assert panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"]


@each_panel
def test_a_panel_uses_the_chosen_data_source(panel: Object) -> None:
    assert [part["datasource"] for part in (panel, *panel["targets"])] == [DATASOURCE] * (1 + len(panel["targets"]))
    references = [target["refId"] for target in panel["targets"]]
    assert len(set(references)) == len(references) > 0


def test_each_panel_has_its_own_id_and_place() -> None:
    everything = PANELS + ROWS
    assert len({panel["id"] for panel in everything}) == len(everything)
    cells = [cell for panel in everything for cell in on(panel)]
    assert len(set(cells)) == len(cells)
    assert {x for x, _ in cells} == set(range(24))


def test_the_variables_match_what_the_queries_use() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables.keys() == {"datasource", "job"}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert variables["job"]["datasource"] == DATASOURCE
    assert variables["job"]["query"]["query"] == "label_values(tpujob_build_info, job)"


def test_every_metric_about_jobs_is_on_the_dashboard(exported: Exported) -> None:
    shown = " ".join(target["expr"] for _, target in TARGETS)
    families = {re.sub("_(bucket|count|sum)$", "", name) for name in exported.labels if name.startswith("tpujob_")}
    assert [family for family in sorted(families) if family not in shown] == []


def test_the_dashboard_reaches_the_cluster_unchanged(helm: Helm) -> None:
    rendered = helm.template(nested("metrics.dashboard.enabled", True))
    found = named(rendered, "ConfigMap", f"{FULL_NAME}-dashboard")
    assert json.loads(found["data"]["tpu-training-operator.json"]) == DASHBOARD
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"


# Scraping


@pytest.mark.parametrize(
    ("value", "api"),
    [
        ("metrics.serviceMonitor.enabled", "monitoring.coreos.com/v1"),
        ("metrics.prometheusRule.enabled", "monitoring.coreos.com/v1"),
        ("metrics.podMonitoring.enabled", "monitoring.googleapis.com/v1"),
        ("metrics.rules.enabled", "monitoring.googleapis.com/v1"),
    ],
)
def test_a_kind_that_the_cluster_lacks_is_refused_with_an_explanation(helm: Helm, value: str, api: str) -> None:
    with pytest.raises(Refused, match=f"{re.escape(value)}: the cluster has no {re.escape(api)}"):
        helm.template(nested(value, True), apis=())


def test_monitors_find_the_metrics_port(helm: Helm) -> None:
    objects = helm.template({"metrics": {"serviceMonitor": {"enabled": True}, "podMonitoring": {"enabled": True}}})
    service, monitor, monitoring = (named(objects, kind) for kind in ("Service", "ServiceMonitor", "PodMonitoring"))
    ports = {port["name"] for port in service["spec"]["ports"]}
    assert [endpoint["port"] for one in (monitor, monitoring) for endpoint in one["spec"]["endpoints"]] == [
        "metrics"
    ] * 2
    assert "metrics" in ports
    wanted: dict[str, Any] = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    pod = named(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert monitoring["spec"]["selector"]["matchLabels"].items() <= pod.items()


def test_without_metrics_no_monitoring_objects_are_created(helm: Helm) -> None:
    everything = {
        part: {"enabled": True} for part in ("serviceMonitor", "podMonitoring", "rules", "prometheusRule", "dashboard")
    }
    objects = helm.template({"metrics": {"enabled": False} | everything})
    assert of_kind(objects, "ServiceMonitor", "PodMonitoring", "Rules", "PrometheusRule", "ConfigMap") == []
    assert [port["name"] for port in named(objects, "Service")["spec"]["ports"]] == ["progress"]


def without_variables(query: str) -> str:
    for variable, value in {"$__rate_interval": "5m", "$__range": "6h", "$job": ".*"}.items():
        query = query.replace(variable, value)
    return query


def test_labels_that_the_scrape_adds_do_not_clash_with_ours(exported: Exported) -> None:
    """Prometheus would rename ours to exported_..., and the queries would match something else."""
    ours = {label for labels in exported.labels.values() for label in labels}
    assert not ours & TARGET_LABELS
