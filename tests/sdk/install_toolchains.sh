#!/usr/bin/env bash
# Makes sure of what the SDK tests need: Node 18 with npm, and Debian's Go with gRPC. As root on Debian what is missing
# is installed; otherwise the missing packages are named and the script fails.
set -euo pipefail

go_packages=(golang-go golang-google-grpc-dev golang-google-genproto-dev golang-google-protobuf-dev
    golang-github-golang-protobuf-1-5-dev protoc-gen-go-1-5 protoc-gen-go-grpc)
missing=()

installed() { [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# Node counts from wherever it comes; npm often comes with it.
node_major=$(node --version 2>/dev/null | sed 's/^v\([0-9]*\).*/\1/') || true
[ "${node_major:-0}" -ge 18 ] || missing+=(nodejs)
command -v npm >/dev/null || missing+=(npm)
for package in "${go_packages[@]}"; do
    installed "$package" || missing+=("$package")
done

[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "make test-sdk needs these Debian 12 packages: ${missing[*]}" >&2
    echo "run: apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
fi
echo "installing ${missing[*]}"
apt-get update --quiet=2
DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends "${missing[@]}" >/dev/null
