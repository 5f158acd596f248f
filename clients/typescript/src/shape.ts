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

/** Throws a `TypeError` for the first name in `value` that is none of `names`. */
export function checkNames(value: unknown, names: readonly string[], path: string): void {
  for (const [name, inner] of Object.entries(objectOf(value, path))) {
    if (inner !== undefined && !names.includes(name)) {
      throw new TypeError(`${path}.${name}: there is no such option; there are ${names.join(", ")}`);
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
  if (field.fieldKind === "scalar" && field.scalar === ScalarType.STRING && typeof value !== "string") {
    throw new TypeError(`${path}: expected a string, got ${kindOf(value)}`);
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
  if (isObject(value) && !Array.isArray(value)) return value;
  throw new TypeError(`${path}: expected an object, got ${kindOf(value)}`);
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null;
}

function kindOf(value: unknown): string {
  if (value === null) return "null";
  return Array.isArray(value) ? "an array" : `a ${typeof value}`.replace(/^a (?=[aeiou])/, "an ");
}

function join(path: string, name: string): string {
  return path ? `${path}.${name}` : name;
}
