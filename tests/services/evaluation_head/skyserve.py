"""SkyServe's own load balancer and autoscaler for a service's file, with replicas that are there already.

Usage: python skyserve.py YAML REPLICA_URL..., in an environment that has SkyPilot, with HOME at an empty directory. It
prints the load balancer's URL and the controller's. The controller's GET /paths has the paths of the requests that the
load balancer got; POST /decide asks the autoscaler as often as its delay lasts.
"""

import asyncio
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import fastapi
import uvicorn
import yaml
from sky.serve.autoscalers import Autoscaler
from sky.serve.constants import INITIAL_VERSION
from sky.serve.load_balancer import SkyServeLoadBalancer
from sky.serve.serve_state import ReplicaStatus
from sky.serve.service_spec import SkyServiceSpec

path, *replica_urls = sys.argv[1:]
spec = SkyServiceSpec.from_yaml_config(yaml.safe_load(Path(path).read_text())["service"])
autoscaler = Autoscaler.from_spec("game-server", spec)
ready = {"version": INITIAL_VERSION, "is_ready": True, "is_terminal": False, "status": ReplicaStatus.READY}
replicas = [
    SimpleNamespace(replica_id=number, cluster_name=f"game-server-{number}", **ready)
    for number in range(len(replica_urls))
]
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
entrance_url, controller_url = (f"http://127.0.0.1:{one.getsockname()[1]}" for one in sockets)
balancer = SkyServeLoadBalancer(controller_url, 0, spec.load_balancing_policy)
controller = fastapi.FastAPI()
paths: list[str] = []


async def proxy(request: fastapi.Request):
    """Forward a request as SkyServe does."""
    paths.append(request.url.path)
    return await balancer._proxy_with_retries(request)


@controller.post("/controller/load_balancer_sync")
async def sync(request: fastapi.Request):
    """Take the request times, as SkyServe's controller does."""
    autoscaler.collect_request_information((await request.json())["request_aggregator"])
    return {"replica_info": {url: {"gpu_type": "unknown"} for url in replica_urls}}


@controller.get("/paths")
async def get_paths():
    """Return the paths of the requests so far."""
    return paths


@controller.post("/decide")
async def decide():
    """Return the operators of the autoscaler's last decisions, and the requests of the last minute."""
    await balancer._sync_with_controller_once()
    decisions = []
    for _ in range(autoscaler.scale_up_threshold):
        decisions = autoscaler.generate_scaling_decisions(replicas, [INITIAL_VERSION])
    operators = [decision.operator.value for decision in decisions]
    return {"operators": operators, "requests": len(autoscaler.request_timestamps)}


async def main():
    """Serve both until the end."""
    entrance = fastapi.FastAPI()
    entrance.add_api_route("/{path:path}", proxy, methods=["GET", "POST", "PUT", "DELETE"])
    servers = [uvicorn.Server(uvicorn.Config(app, log_level="warning")) for app in (entrance, controller)]
    serving = [server.serve(sockets=[one]) for server, one in zip(servers, sockets, strict=True)]
    tasks = [asyncio.create_task(one) for one in serving]
    # The sockets listen already, so the controller answers as soon as it serves.
    await balancer._sync_with_controller_once()
    print(entrance_url, controller_url, flush=True)
    await asyncio.gather(*tasks)


asyncio.run(main())
