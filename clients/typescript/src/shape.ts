// What callers pass, held to the contract by name: protobuf leaves out in silence what a message has no field for.
import { type DescField, type DescMessage, type DescOneof, ScalarType } from "@bufbuild/protobuf";

/** Throws a `TypeError` that names the first field of `value` that `message` does not have, or that is no object. */
export function checkShape(message: DescMessage, value: unknown, path = ""): void {
  // Made by `create`, which has checked it; the library's own types take JSON.
  if (isObject(value) && "$typeName" in value) return;
  if (message.typeName.startsWith("google.protobuf.")) return;
  const given = objectOf(value, path || message.name);
  for (const [name, inner] of Object.entries(given)) {
    if (inner === undefined) continue;
    const member = message.members.find(({ localName }) => localName === name);
    if (member === undefined) throw new TypeError(unknown(join(path, name), message, name));
    if (member.kind === "oneof") checkOneof(member, inner, join(path, name));
    else checkField(member, inner, join(path, name));
  }
}

/** The kinds of values that options have, by `typeof`, and by what they must have where that is "object". */
const KINDS: Record<string, string> = {
  timeoutMs: "number", generateTimeoutMs: "number", attempts: "number", token: "string", ca: "string",
  certificate: "string", key: "string", serverName: "string", onHeader: "function", onTrailer: "function",
};

/** Throws a `TypeError` for the first name in `value` that is none of `names`, or whose value is of another kind. */
export function checkNames(value: unknown, names: readonly string[], path: string): void {
  for (const [name, inner] of Object.entries(objectOf(value, path))) {
    if (inner === undefined) continue;
    if (!names.includes(name)) {
      throw new TypeError(`${path}.${name}: there is no such option; there are ${names.join(", ")}`);
    }
    const kind = KINDS[name];
    if (kind !== undefined && (typeof inner !== kind || Number.isNaN(inner))) {
      throw new TypeError(`${path}.${name}: expected a ${kind}, got ${kindOf(inner)}`);
    }
    if (name === "signal" && !(inner instanceof AbortSignal)) {
      throw new TypeError(`${path}.signal: expected an AbortSignal, got ${kindOf(inner)}`);
    }
  }
}

function checkField(field: DescField, value: unknown, path: string): void {
  if (field.fieldKind === "message") checkShape(field.message, value, path);
  if (field.fieldKind === "list") {
    if (!Array.isArray(value)) throw new TypeError(`${path}: expected an array, got ${kindOf(value)}`);
    const { message } = field;
    if (message) value.forEach((one, index) => checkShape(message, one, `${path}[${index}]`));
  }
  if (field.fieldKind === "map") objectOf(value, path);
  if (field.fieldKind !== "scalar") return;
  if (field.scalar === ScalarType.STRING && typeof value !== "string") {
    throw new TypeError(`${path}: expected a string, got ${kindOf(value)}`);
  }
  if (field.scalar === ScalarType.UINT32 && !(typeof value === "number" && value >= 0 && Number.isInteger(value))) {
    const given = typeof value === "number" ? value : kindOf(value);
    throw new TypeError(`${path}: expected a whole number that is not negative, got ${given}`);
  }
}

function checkOneof(oneof: DescOneof, value: unknown, path: string): void {
  const { case: chosen, value: inner } = objectOf(value, path);
  if (chosen === undefined) return;
  const field = oneof.fields.find(({ localName }) => localName === chosen);
  if (field === undefined) {
    const cases = oneof.fields.map(({ localName }) => localName).join(", ");
    throw new TypeError(`${path}.case: there is no ${JSON.stringify(chosen)}; there are ${cases}`);
  }
  checkField(field, inner, `${path}.value`);
}

function unknown(path: string, message: DescMessage, name: string): string {
  const meant = name.replace(/_+([a-z0-9])/g, (_, letter: string) => letter.toUpperCase());
  const known = message.members.some(({ localName }) => localName === meant);
  return `${path}: ${message.name} has no such field${known ? `; did you mean ${meant}?` : ""}`;
}

function objectOf(value: unknown, path: string): Record<string, unknown> {
  if (isPlain(value)) return value;
  throw new TypeError(`${path}: expected an object, got ${kindOf(value)}`);
}

/** Whether an object is one of names and values: of another class, such as a signal, it would have none. */
function isPlain(value: unknown): value is Record<string, unknown> {
  if (!isObject(value) || Array.isArray(value)) return false;
  return Object.keys(value).length > 0 || [Object.prototype, null].includes(Object.getPrototypeOf(value) as object | null);
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null;
}

function kindOf(value: unknown): string {
  if (value === null) return "null";
  if (Array.isArray(value)) return "an array";
  const name = isObject(value) ? (value.constructor?.name ?? "object") : String(value) === "NaN" ? "NaN" : typeof value;
  return `a ${name === "Object" ? "object" : name}`.replace(/^a (?=[aeiouA])/, "an ");
}

function join(path: string, name: string): string {
  return path ? `${path}.${name}` : name;
}
