import { X509Certificate } from "node:crypto";
import { readFileSync } from "node:fs";
import { connect as connectSocket } from "node:net";
import { createSecureContext } from "node:tls";

import type { Interceptor, Transport } from "@connectrpc/connect";
import { createGrpcTransport, type GrpcTransportOptions, Http2SessionManager } from "@connectrpc/connect-node";

import { checkNames } from "./shape.js";

/** How to check the service, and who we are. `ca`, `certificate` and `key` are paths of PEM files. */
export interface TlsOptions {
  /** The authority that signed the service's certificate. Default: those of Node. */
  ca?: string;
  /** The client's own, for mutual TLS. Give both or none. */
  certificate?: string;
  key?: string;
  /** What the certificate must name, where it differs from the address. */
  serverName?: string;
}

export interface ConnectOptions {
  /** Sent as a bearer token with every call. */
  token?: string;
  /** Whether to speak TLS, and how. Default false: plain text. */
  tls?: boolean | TlsOptions;
  /** Deadline of calls with one answer. 0: none. Default 10 seconds. */
  timeoutMs?: number;
  /** Deadline of a whole generation, waiting for its turn included. 0: none. Default 10 minutes. */
  generateTimeoutMs?: number;
  /** How often to make a call that the service asks to try again later, the first time included. Default 4. */
  attempts?: number;
}

/**
 * A plain gRPC transport to `HOST:PORT` or `unix:PATH`, and what closes its connection. Throws `TypeError` for what is
 * no address, for options that there are not, and for files of TLS that cannot be used.
 */
export function connect(address: string, options: ConnectOptions): [Transport, () => void] {
  checkAddress(address);
  checkNames(options, ["token", "tls", "timeoutMs", "generateTimeoutMs", "attempts"], "options");
  const { token, tls = false } = options;
  if (typeof tls !== "boolean") checkNames(tls, ["ca", "certificate", "key", "serverName"], "options.tls");
  const interceptors = token === undefined ? [] : [bearer(token)];
  const unixPath = address.startsWith("unix:") ? address.slice("unix:".length) : undefined;
  const baseUrl = `${tls ? "https" : "http"}://${unixPath === undefined ? address : "localhost"}`;
  const nodeOptions: NonNullable<GrpcTransportOptions["nodeOptions"]> = {
    ...(tls ? tlsOptions(tls === true ? {} : tls) : {}),
    ...(unixPath === undefined ? {} : { createConnection: () => connectSocket(unixPath) }),
  };
  const sessionManager = new Http2SessionManager(baseUrl, {}, nodeOptions);
  return [createGrpcTransport({ baseUrl, sessionManager, interceptors }), () => sessionManager.abort()];
}

function checkAddress(address: string): void {
  if (/^unix:.+/.test(address) || /^(\[[0-9A-Fa-f:.%]+\]|[^\s:/[\]]+):\d{1,5}$/.test(address)) return;
  throw new TypeError(`address ${JSON.stringify(address)}: expected HOST:PORT or unix:PATH`);
}

function tlsOptions({ ca, certificate, key, serverName }: TlsOptions): object {
  if ((certificate === undefined) !== (key === undefined)) {
    throw new TypeError("tls: a certificate needs its key, and a key its certificate");
  }
  const files = {
    ...(ca === undefined ? {} : { ca: read(ca) }),
    ...(certificate === undefined ? {} : { cert: read(certificate) }),
    ...(key === undefined ? {} : { key: read(key) }),
  };
  if (ca !== undefined) attempt(`${ca} holds no PEM certificate`, () => new X509Certificate(files.ca!));
  if (certificate !== undefined) {
    attempt(`${certificate} and ${key} are no certificate and its key`, () => createSecureContext(files));
  }
  return { minVersion: "TLSv1.2", ...files, ...(serverName === undefined ? {} : { servername: serverName }) };
}

function read(path: string): Buffer {
  return attempt(`cannot read ${path}`, () => readFileSync(path));
}

/** What `action` gives; a `TypeError` that begins with `problem` where it fails. */
function attempt<T>(problem: string, action: () => T): T {
  try {
    return action();
  } catch (error) {
    throw new TypeError(`tls: ${problem}: ${error instanceof Error ? error.message : String(error)}`);
  }
}

function bearer(token: string): Interceptor {
  return (next) => (request) => {
    request.header.set("authorization", `Bearer ${token}`);
    return next(request);
  };
}
