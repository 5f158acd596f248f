"""Waiting for a service to take calls: its port is open before."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


async def ready(channel: grpc.aio.Channel, service: str = "") -> None:
    """Return once `service` is SERVING, whether or not anybody listens yet."""
    request = health_pb2.HealthCheckRequest(service=service)
    while True:
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True)
        try:
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            return
        except grpc.aio.AioRpcError:
            # The end of one that listened here before.
            continue
        finally:
            watch.cancel()


async def becomes(watch: Any, status: Any) -> None:
    """Return once a health watch says `status`, whatever it says before."""
    while (await watch.read()).status != status:
        pass
