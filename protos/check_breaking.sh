#!/usr/bin/env bash
# Fails when the contract breaks what was released, by buf's FILE rules. Usage: check_breaking.sh BUF
# Compared with the last release tag before this commit; while there is none, with where the branch left main, or on
# main with the commit before. A shallow clone of one commit has nothing to compare with, and says so.
set -euo pipefail
buf=$(realpath "$1")
cd "$(dirname "$0")/.."

base_commit() {
    git describe --tags --abbrev=0 --match 'v[0-9]*' HEAD~1 2>/dev/null && return
    local main head fork
    head=$(git rev-parse HEAD)
    for main in origin/main main; do
        fork=$(git merge-base "$main" HEAD 2>/dev/null) || continue
        [ "$fork" != "$head" ] && echo "$fork" && return
    done
    git rev-parse --verify --quiet HEAD~1
}

if ! base=$(base_commit) || ! git cat-file -e "$base:protos/outrider/v1" 2>/dev/null; then
    echo "check_breaking: no earlier contract in this clone, nothing to compare with"
    exit 0
fi
before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
git archive "$base" buf.yaml protos | tar -x -C "$before"
echo "check_breaking: against $base"
"$buf" breaking --against "$before"
