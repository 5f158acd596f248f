#!/usr/bin/env bash
# Gives this module the path it is published under: set_module.sh github.com/you/outrider/clients/go
# It rewrites go.mod and the imports; generated code imports nothing of the module.
set -euo pipefail

[ $# -eq 1 ] || { echo 'usage: set_module.sh MODULE_PATH' >&2; exit 2; }
if ! [[ $1 =~ ^[a-z0-9-]+(\.[a-z0-9-]+)+(/[A-Za-z0-9._~-]+)+$ ]]; then
    echo "$1: expected a path that go get can fetch, such as github.com/you/outrider/clients/go" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")"
before=$(sed -n 's/^module //p' go.mod)
sed -i "1s#.*#module $1#" go.mod
find . -name '*.go' -not -path './outriderv1/*' -exec sed -i "s#\"${before//./\\.}\([/\"]\)#\"$1\1#" {} +
