"""The addresses on which a rollout node's programs listen, and those at which other nodes reach them."""

from __future__ import annotations

from dataclasses import dataclass

from services.core import endpoints
from services.core.endpoints import Endpoint, Task


@dataclass(frozen=True)
class Addresses:
    """The addresses on which this node's programs listen, and the public addresses of router and workers."""

    engines: list[Endpoint]
    """The addresses on which this node's engines listen."""
    router: Endpoint
    router_metrics: Endpoint
    auth_proxy: Endpoint | None
    """In front of the router; None without a token."""
    public_router: Endpoint
    """The address at which every node reaches the router, through the proxy if there is one."""
    own_workers: list[Endpoint]
    """The addresses at which every node reaches this node's engines."""
    first_workers: list[Endpoint]
    """The addresses at which every node reaches the first engine of each node, by rank."""


def choose_addresses(
    *,
    has_token: bool,
    n_engines: int = 1,
    host: str | None = None,
    port: int | None = None,
    engine_port: int | None = None,
) -> Addresses:
    """Return this node's addresses; ``host`` and the ports are those of the command line, None where it has none.

    Further engines have ports as far from the first one's as those of ``ENGINE_PORTS``.

    With a token the router listens to its own node only, because it does not ask for the token on all its routes and
    never on its metrics' port.
    """

    def public(default_port: int, chosen_port: int | None = None) -> Endpoint:
        default = endpoints.bind_address(Task.ROLLOUT_SERVER, default_port)
        return Endpoint(host or default.host, chosen_port or default.port)

    def private(default_port: int) -> Endpoint:
        default = endpoints.bind_address(Task.ROLLOUT_SERVER, default_port)
        return Endpoint("127.0.0.1", default.port) if default.host in endpoints.EVERYWHERE else default

    own_rank = endpoints.node_rank()
    front = public(endpoints.ROUTER_PORT, port)
    usual_ports = endpoints.ENGINE_PORTS[:n_engines]
    engines = [public(usual, engine_port and engine_port + usual - endpoints.ENGINE_PORT) for usual in usual_ports]
    own_workers = [_reached(engine, usual) for engine, usual in zip(engines, usual_ports, strict=True)]

    def first_worker(rank: int) -> Endpoint:
        usual = endpoints.endpoint(Task.ROLLOUT_SERVER, endpoints.ENGINE_PORT, rank)
        return own_workers[0] if rank == own_rank else Endpoint(usual.host, engine_port or usual.port)

    usual_router = endpoints.endpoint(Task.ROLLOUT_SERVER)
    return Addresses(
        engines=engines,
        router=private(endpoints.ROUTER_INNER_PORT) if has_token else front,
        router_metrics=(private if has_token else public)(endpoints.ROUTER_METRICS_PORT),
        auth_proxy=front if has_token else None,
        public_router=endpoints.reached_at(front, usual_router)
        if own_rank == 0
        else Endpoint(usual_router.host, port or usual_router.port),
        own_workers=own_workers,
        first_workers=[first_worker(rank) for rank in range(endpoints.num_nodes())],
    )


def _reached(listen: Endpoint, usual_port: int) -> Endpoint:
    """Return the address at which every node reaches a program of this node."""
    return endpoints.reached_at(listen, endpoints.endpoint(Task.ROLLOUT_SERVER, usual_port, endpoints.node_rank()))
