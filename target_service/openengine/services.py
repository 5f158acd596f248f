"""Both services as gRPC handlers, made by the contract alone: its Python package has no stubs of servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from outrider.openengine import openengine_pb2 as pb
from outrider.serving import GrpcServer, Service
from target_service.api.server import TargetServicer
from target_service.openengine.control import ControlledTarget, ControlServicer
from target_service.openengine.inference import InferenceServicer
from target_service.openengine.open_requests import OpenRequests

_INFERENCE, _CONTROL = (pb.DESCRIPTOR.services_by_name[name] for name in ("Inference", "Control"))


class OpenEngineServices:
    """The services of one server: `services` are for its making, and `serve` is for when the model is loaded."""

    def __init__(self) -> None:
        self._control = ControlServicer()
        self.services = [
            Service(_INFERENCE.full_name),
            # From the start, since it tells that the target starts.
            Service(_CONTROL.full_name, lambda to: _add(to, _CONTROL, self._control)),
        ]

    def serve(self, server: GrpcServer, target: TargetServicer) -> None:
        """Answer for a target from now on."""
        requests = OpenRequests(target.sequences)
        self._control.serve(ControlledTarget(target, requests, server.health, server.address))
        server.provide(_INFERENCE.full_name, lambda to: _add(to, _INFERENCE, InferenceServicer(target, requests)))


# By whether responses are a stream.
_KINDS: Mapping[bool, Any] = {
    False: grpc.unary_unary_rpc_method_handler,
    True: grpc.unary_stream_rpc_method_handler,
}


def _add(server: Any, service: Any, servicer: object) -> None:
    handlers = {}
    for method in service.methods:
        handlers[method.name] = _KINDS[method.server_streaming](
            getattr(servicer, method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
