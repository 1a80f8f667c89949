"""Write docs/grafana.json, a dashboard of trainer and services: ``python -m scripts.reference.grafana [--check]``."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from scripts.reference.generated import ROOT, write_or_check

TARGET = ROOT / "docs" / "grafana.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT, COLUMNS = 8, 7, 24
WINDOW = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """A plot of series, each an expression and a legend; ``unit`` is a unit's name in Grafana."""

    title: str
    series: tuple[tuple[str, str], ...]
    unit: str = "short"


def rate(counter: str, by: str = "") -> str:
    """Return the expression for a counter's growth a second, summed over all labels but ``by``."""
    return f"sum{f' by ({by})' if by else ''} (rate({counter}{WINDOW}))"


_SLOWEST = f"histogram_quantile(0.95, sum by (service, le) (rate(http_request_duration_seconds_bucket{WINDOW})))"

ROWS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel("Reward", (("trainer_reward_mean", "mean"), ("trainer_reward_std", "standard deviation"))),
        Panel("Held-out accuracy", (("trainer_accuracy_ratio", "greedy pass@1"),), "percentunit"),
        Panel("Loss", (("trainer_loss", "{{groups}}"),)),
        Panel("KL", (("trainer_kl_behaviour_nats", "behaviour"), ("trainer_kl_reference_nats", "reference"))),
        Panel("Entropy", (("trainer_entropy_nats", "{{groups}}"),)),
        Panel("Gradient norm", (("trainer_grad_norm", "{{groups}}"),)),
        Panel("Clipped tokens", (("trainer_clipped_tokens_ratio", "{{groups}}, {{bound}}"),), "percentunit"),
        Panel(
            "Tokens a completion",
            (("trainer_completion_length_mean", "mean"), ("trainer_completion_length_max", "max")),
        ),
        Panel("Cut off at MAX_NEW_TOKENS", (("trainer_truncated_ratio", "share"),), "percentunit"),
    ),
    "Speed": (
        Panel("Share of time by phase", ((rate("trainer_phase_seconds_total", "phase"), "{{phase}}"),), "percentunit"),
        Panel("Tokens a second", ((rate("trainer_tokens_total", "kind"), "{{kind}}"),)),
        Panel("Steps an hour", ((f"3600 * {rate('trainer_steps_total')}", "steps"),)),
        Panel("Groups a second", ((rate("trainer_groups_total", "kind"), "{{kind}}"),)),
        Panel("Staleness", (("trainer_staleness_mean", "mean"), ("trainer_staleness_max", "max"))),
        Panel("Memory of rank 0, peak", (("trainer_peak_memory_bytes", "peak"),), "bytes"),
    ),
    "Rollouts": (
        Panel(
            "Engines: sequences",
            (("sglang:num_running_reqs", "{{instance}} running"), ("sglang:num_queue_reqs", "{{instance}} waiting")),
        ),
        Panel("Engines: tokens a second", ((rate("sglang:generation_tokens_total", "instance"), "{{instance}}"),)),
        Panel("Policy version, workers", (("trainer_policy_version", "version"), ("trainer_workers", "workers"))),
        Panel("Requests in flight", (("rollout_requests_in_flight", "{{instance}}"),)),
        Panel("Asked for again", ((rate("rollout_resubmitted_total", "reason"), "{{reason}}"),)),
        Panel(
            "Lost", ((rate("rollout_missing_total"), "completions"), (rate("trainer_prompts_failed_total"), "prompts"))
        ),
    ),
    "Services": (
        Panel(
            "Requests a second", ((rate("http_requests_total", "service, status"), "{{service}} {{status}}"),), "reqps"
        ),
        Panel("Slowest twentieth", ((_SLOWEST, "{{service}}"),), "s"),
        Panel("Retries a second", ((rate("client_retries_total", "service"), "{{service}}"),)),
        Panel("Rewards a second", ((rate("reward_answers_total", "status"), "{{status}}"),)),
        Panel("Reward workers", (("reward_workers_alive", "alive"), ("reward_answers_pending", "answers pending"))),
        Panel("Replay buffer", (("replay_groups", "groups"), ("replay_queue_groups", "fresh, {{place}}"))),
        Panel("Replay buffer's disk", (("replay_disk_bytes", "disk"),), "bytes"),
        Panel("Prompts a second", ((rate("data_prompts_served_total", "split"), "{{split}}"),)),
        Panel("Memory", (("process_resident_memory_bytes", "{{job}} {{instance}}"),), "bytes"),
    ),
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it; its data source is a variable."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(
            {"type": "row", "title": title, "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1}, "panels": []}
        )
        top += 1
        for place, panel in enumerate(row):
            line, left = divmod(place * WIDTH, COLUMNS)
            panels.append(_plot(panel, left, top + line * HEIGHT))
        top += -(-len(row) * WIDTH // COLUMNS) * HEIGHT
    for number, shown in enumerate(panels, 1):
        shown["id"] = number
    variable = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "title": "GRPO",
        "uid": "skypilot-grpo",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [variable]},
        "panels": panels,
    }


def _plot(panel: Panel, left: int, top: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
        for number, (expression, legend) in enumerate(panel.series)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"x": left, "y": top, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def main(arguments: list[str]) -> int:
    """Write the file, or check that it is up to date with --check; return the exit code."""
    return write_or_check(TARGET, json.dumps(dashboard(), indent=1) + "\n", "scripts.reference.grafana", arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
