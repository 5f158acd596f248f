import type { Transport } from "@connectrpc/connect";
export interface ConnectOptions {
    /** Sent as a bearer token with every call. */
    token?: string;
    /** Whether to speak TLS, checked against the system's roots. Default false. */
    tls?: boolean;
}
/** A gRPC transport to `HOST:PORT` or `unix:PATH`. */
export declare function createTransport(address: string, { token, tls }?: ConnectOptions): Transport;
