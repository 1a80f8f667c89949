"""The targets that Prometheus makes of pods by docs/cluster/prometheus.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[1] / "docs/cluster/prometheus.yaml"
ADDRESS = "10.1.2.3"


def targets(pods: Iterable[dict[str, Any]]) -> dict[str, set[tuple[str, str]]]:
    """Return by scrape job the instance and the address of each target, for pods as Kubernetes has them."""
    return {job: {(one["instance"], one["__address__"]) for one in its} for job, its in labels(pods).items()}


def labels(pods: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, str]]]:
    """Return the labels of each target by scrape job."""
    found: dict[str, list[dict[str, str]]] = {}
    for job in scrape_jobs():
        [discovery] = job["kubernetes_sd_configs"]
        [selector] = discovery["selectors"]
        key, _, value = selector["label"].partition("=")
        chosen = [pod["metadata"] for pod in pods if pod["metadata"]["labels"].get(key) == value]
        relabelled = [relabel(_meta_labels(metadata), job["relabel_configs"]) for metadata in chosen]
        found[job["job_name"]] = [one for one in relabelled if one is not None]
    return found


def scrape_jobs() -> list[dict[str, Any]]:
    """Return the scrape jobs of the file."""
    jobs: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["scrape_configs"]
    return jobs


def _meta_labels(metadata: dict[str, Any]) -> dict[str, str]:
    own = {re.sub(r"\W", "_", key): text for key, text in metadata["labels"].items()}
    return {f"__meta_kubernetes_pod_label_{key}": text for key, text in own.items()} | {
        "__meta_kubernetes_pod_name": metadata["name"],
        "__meta_kubernetes_pod_ip": ADDRESS,
        "__meta_kubernetes_namespace": metadata.get("namespace", "default"),
    }


def relabel(labels: dict[str, str], rules: list[dict[str, Any]]) -> dict[str, str] | None:
    """Return the labels after the rules (replace and keep, as Prometheus applies them); None: the target is dropped."""
    for rule in rules:
        assert rule.keys() <= {"source_labels", "separator", "regex", "target_label", "replacement", "action"}, rule
        text = rule.get("separator", ";").join(labels.get(name, "") for name in rule["source_labels"])
        found = re.fullmatch(rule.get("regex", "(.*)"), text)
        if rule.get("action") == "keep":
            if found is None:
                return None
        elif found is not None:
            labels[rule["target_label"]] = found.expand(re.sub(r"\$(\d)", r"\\\1", rule.get("replacement", "$1")))
    return labels
