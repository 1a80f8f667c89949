"""As much of a Kubernetes API server as SkyPilot needs to ask for pods: it keeps what it is given and runs nothing.

Pods stay pending, as on a cluster that has no room.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

Object = dict[str, Any]

VERSION = {"major": "1", "minor": "33", "gitVersion": "v1.33.0", "platform": "linux/amd64"}
KINDS = {
    "pods": "Pod",
    "nodes": "Node",
    "services": "Service",
    "events": "Event",
    "namespaces": "Namespace",
    "configmaps": "ConfigMap",
    "secrets": "Secret",
    "serviceaccounts": "ServiceAccount",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "roles": "Role",
    "rolebindings": "RoleBinding",
    "clusterroles": "ClusterRole",
    "clusterrolebindings": "ClusterRoleBinding",
    "storageclasses": "StorageClass",
    "ingressclasses": "IngressClass",
    "runtimeclasses": "RuntimeClass",
    "deployments": "Deployment",
    "daemonsets": "DaemonSet",
}


def node(name: str, accelerator: str | None = None, count: int = 0) -> Object:
    """A node of the cluster with GPUs, labelled as SkyPilot's own labeller does."""
    capacity = {"cpu": "64", "memory": "512Gi", "pods": "110", "ephemeral-storage": "1Ti"}
    labels = {"kubernetes.io/hostname": name}
    if accelerator is not None:
        capacity["nvidia.com/gpu"] = str(count)
        labels["skypilot.co/accelerator"] = accelerator.lower()
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {},
        "status": {
            "capacity": capacity,
            "allocatable": capacity,
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def storage_class(name: str) -> Object:
    """The cluster's default storage class."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": "example.com/nfs",
        "volumeBindingMode": "Immediate",
    }


class KubernetesApi:
    """The objects there are, by path, and the application that serves them."""

    def __init__(self, nodes: Iterable[Object], storage: Object) -> None:
        self.objects: dict[str, Object] = {f"/api/v1/nodes/{one['metadata']['name']}": one for one in nodes}
        self.objects[f"/apis/storage.k8s.io/v1/storageclasses/{storage['metadata']['name']}"] = storage
        self.posted: list[Object] = []
        """Everything that was ever asked for."""
        self.unserved: list[str] = []
        """Requests that this server does not know how to answer."""
        self.app = FastAPI()
        self.app.add_api_route("/version", lambda: VERSION)
        self.app.add_api_route("/readyz", lambda: PlainTextResponse("ok"))
        self.app.add_api_route("/{path:path}", self._answer, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])

    def pods(self) -> list[Object]:
        """The pods there are."""
        return [one for path, one in list(self.objects.items()) if "/pods/" in path]

    async def _answer(self, request: Request) -> Response:
        path = f"/{request.path_params['path']}"
        parts = path.strip("/").split("/")
        # /api/v1/... or /apis/GROUP/VERSION/..., then [namespaces/NAMESPACE/]PLURAL[/NAME].
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            rest = rest[2:]
        if not rest or rest[0] not in KINDS or len(rest) > 2:
            self.unserved.append(f"{request.method} {path}")
            return refusal(404, f"{path} is not served")
        if len(rest) == 2:
            return await self._one(request, path)
        if request.method == "POST":
            return self._create(path, rest[0], await request.json())
        found = self._select(path, rest[0], request.query_params)
        if request.method == "DELETE":
            for at in found:
                del self.objects[at]
        elif request.method != "GET":
            return refusal(405, f"{request.method} of a list is not served")
        metadata = {"resourceVersion": str(len(self.posted))}
        kind = f"{KINDS[rest[0]]}List"
        return JSONResponse({"apiVersion": "v1", "kind": kind, "metadata": metadata, "items": list(found.values())})

    async def _one(self, request: Request, path: str) -> Response:
        found = self.objects.get(path)
        if found is None:
            return refusal(404, f"{path} not found")
        if request.method == "DELETE":
            del self.objects[path]
        elif request.method in ("PUT", "PATCH"):
            merge(found, await request.json())
        return JSONResponse(found)

    def _create(self, path: str, plural: str, given: Object) -> Response:
        name = given["metadata"]["name"]
        if f"{path}/{name}" in self.objects:
            return refusal(409, f"{path}/{name} already exists", "AlreadyExists")
        metadata = given["metadata"] | {
            "uid": str(uuid.uuid4()),
            "creationTimestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "resourceVersion": str(len(self.posted) + 1),
        }
        status = {"status": {"phase": "Pending", "conditions": []}} if plural == "pods" else {}
        created = {"apiVersion": "v1", "kind": KINDS[plural], **given, "metadata": metadata, **status}
        self.objects[f"{path}/{name}"] = created
        self.posted.append(created)
        return JSONResponse(created, 201)

    def _select(self, path: str, plural: str, query: Mapping[str, str]) -> dict[str, Object]:
        namespaced = "/namespaces/" in path
        return {
            at: one
            for at, one in list(self.objects.items())
            if at.split("/")[-2] == plural
            and (not namespaced or at.startswith(f"{path}/"))
            and selected(one, query.get("labelSelector", ""))
            and has_fields(one, query.get("fieldSelector", ""))
        }


def has_fields(given: Object, selector: str) -> bool:
    """Return whether fields fit a selector such as ``metadata.name=a,status.phase!=Failed``."""
    for term in filter(None, selector.split(",")):
        path, operator, value = re.fullmatch(r"([\w.]+)(!=|==?)(.*)", term).groups()
        found: Any = given
        for key in path.split("."):
            found = found.get(key, {})
        if (found == value) == (operator == "!="):
            return False
    return True


def selected(given: Object, selector: str) -> bool:
    """Whether labels are what a selector of equalities asks for."""
    labels = given["metadata"].get("labels", {})
    wanted = [term.replace("==", "=").partition("=") for term in selector.split(",") if term]
    return all(labels.get(key) == value if equals else key in labels for key, equals, value in wanted)


def merge(into: Object, changes: Object) -> None:
    """Applies a merge patch."""
    for key, value in changes.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def refusal(code: int, message: str, reason: str = "NotFound") -> Response:
    """A Status, which is how Kubernetes says no."""
    status = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code}
    return JSONResponse(status | {"message": message, "reason": reason}, code)
