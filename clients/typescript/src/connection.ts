import { connect as connectSocket } from "node:net";

import type { Interceptor, Transport } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

export interface ConnectOptions {
  /** Sent as a bearer token with every call. */
  token?: string;
  /** Whether to speak TLS, checked against the system's roots. Default false. */
  tls?: boolean;
}

/** A gRPC transport to `HOST:PORT` or `unix:PATH`. */
export function createTransport(address: string, { token, tls = false }: ConnectOptions = {}): Transport {
  const interceptors = token === undefined ? [] : [bearer(token)];
  if (address.startsWith("unix:")) {
    const path = address.slice("unix:".length);
    const nodeOptions = { createConnection: () => connectSocket(path) };
    return createGrpcTransport({ baseUrl: "http://localhost", nodeOptions, interceptors });
  }
  return createGrpcTransport({ baseUrl: `${tls ? "https" : "http"}://${address}`, interceptors });
}

function bearer(token: string): Interceptor {
  return (next) => (request) => {
    request.header.set("authorization", `Bearer ${token}`);
    return next(request);
  };
}
