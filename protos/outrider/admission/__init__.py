"""The rules by which a server lets callers in: which share each has, how soon it is refused, how long its texts may be,
and who waits. Both services and the gateway use them. Needs no gRPC."""
