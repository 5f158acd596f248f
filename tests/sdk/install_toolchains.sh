#!/usr/bin/env bash
# Makes sure of what the SDK tests need: Node 18 with npm, and Go with gRPC for it.
#
# Node comes from the system; as root on Debian it is installed where it is missing. Debian 12's own Go is too old for a
# current gRPC, and a module proxy may be out of reach, so Go, its libraries and its plugins are Debian 13's, with
# backports where those are newer. They are unpacked into build/go/debian; nothing of the system changes.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
go=$root/build/go
mirror=http://deb.debian.org/debian
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

node_packages() {
    # Node counts from wherever it comes; npm often comes with it.
    local major
    major=$(node --version 2>/dev/null | sed 's/^v\([0-9]*\).*/\1/') || true
    [ "${major:-0}" -ge 18 ] || echo nodejs
    command -v npm >/dev/null || echo npm
}

install_node() {
    local missing
    mapfile -t missing < <(node_packages)
    [ ${#missing[@]} -eq 0 ] && return
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "make test-sdk needs these Debian 12 packages: ${missing[*]}" >&2
        echo "run: apt-get install --no-install-recommends ${missing[*]}" >&2
        exit 1
    fi
    echo "installing ${missing[*]}"
    apt-get update --quiet=2
    DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends "${missing[@]}" >/dev/null
}

unpack_go() {
    # A finished download is kept until this script changes.
    local stamp
    stamp=$(sha256sum "${BASH_SOURCE[0]}" | cut -d' ' -f1)
    [ "$(cat "$go/debian/.stamp" 2>/dev/null)" = "$stamp" ] && return
    for tool in apt-get dpkg-deb; do
        command -v $tool >/dev/null || { echo "make test-sdk needs Debian's $tool to fetch Go" >&2; exit 1; }
    done
    echo "unpacking Go and gRPC into build/go/debian"
    rm -rf "$go"
    mkdir -p "$go/apt/lists/partial" "$go/apt/cache/archives/partial" "$go/debian"
    printf "deb [signed-by=$keyring] $mirror %s main\n" trixie trixie-backports >"$go/apt/sources.list"
    local apt=(-o "Dir::Etc::SourceList=$go/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$go/apt/lists" -o "Dir::Cache=$go/apt/cache" -o "APT::Sandbox::User=$(id -un)"
        -o Acquire::Languages=none --quiet=2)
    apt-get "${apt[@]}" update
    local compiler packages
    compiler=$(apt-cache "${apt[@]}" depends golang-go/trixie-backports |
        sed -n 's/^ *Depends: \(golang-[0-9.]*\)-go$/\1/p')
    # Backports move together; the plugins decide what generated code looks like, so they stay with the release.
    packages=("$compiler"-{go,src}/trixie-backports golang-google-{grpc,genproto}-dev/trixie-backports
        golang-golang-x-{net,sys,text}-dev/trixie-backports golang-google-protobuf-dev/trixie
        golang-github-golang-protobuf-1-5-dev/trixie protoc-gen-go/trixie protoc-gen-go-grpc/trixie)
    (cd "$go/apt" && apt-get "${apt[@]}" download "${packages[@]}")
    for package in "$go"/apt/*.deb; do dpkg-deb --extract "$package" "$go/debian"; done
    rm -rf "$go/apt"
    ln -s "usr/lib/${compiler/lang/}" "$go/debian/go"
    echo "$stamp" >"$go/debian/.stamp"
}

install_node
unpack_go
