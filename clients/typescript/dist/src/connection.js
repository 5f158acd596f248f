import { connect as connectSocket } from "node:net";
import { createGrpcTransport } from "@connectrpc/connect-node";
/** A gRPC transport to `HOST:PORT` or `unix:PATH`. */
export function createTransport(address, { token, tls = false } = {}) {
    const interceptors = token === undefined ? [] : [bearer(token)];
    if (address.startsWith("unix:")) {
        const path = address.slice("unix:".length);
        const nodeOptions = { createConnection: () => connectSocket(path) };
        return createGrpcTransport({ baseUrl: "http://localhost", nodeOptions, interceptors });
    }
    return createGrpcTransport({ baseUrl: `${tls ? "https" : "http"}://${address}`, interceptors });
}
function bearer(token) {
    return (next) => (request) => {
        request.header.set("authorization", `Bearer ${token}`);
        return next(request);
    };
}
