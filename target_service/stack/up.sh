#!/usr/bin/env bash
# Brings the compose stack up and waits until every container is healthy: up.sh [FLAG..], flags such as --profile NAME.
#
# Works with `docker compose`, and with docker-compose 1.29 of Debian 12, which has no --wait. A container that fails
# ends the wait at once, with the end of its log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# The longest start_period of compose.yaml, and time to load a model after it. Chosen.
most_seconds=${OUTRIDER_UP_SECONDS:-900}

fail() {
    printf 'make up: %s\n' "$@" >&2
    exit 1
}

find_compose() {
    command -v docker >/dev/null || fail 'docker is not installed' \
        'on Debian: apt-get install docker.io docker-compose, and then start dockerd'
    local error
    error=$(docker info --format '{{.ServerVersion}}' 2>&1 >/dev/null) || fail "${error##*$'\n'}" \
        'Docker has to run, and this user has to be root or in the group docker'
    if docker compose version >/dev/null 2>&1; then
        compose=(docker compose)
    elif command -v docker-compose >/dev/null; then
        compose=(docker-compose)
    else
        fail 'docker is here, compose is not: apt-get install docker-compose, or docker-compose-plugin'
    fi
}

# One line for each container of the stack: NAME|STATUS|EXIT CODE|RESTARTS|HEALTH, without those of `compose run`.
containers() {
    local ids
    ids=$("${compose[@]}" "$@" ps --all --quiet)
    [ -n "$ids" ] || return 0
    # shellcheck disable=SC2086 # one id a word
    docker inspect --format '{{if ne (index .Config.Labels "com.docker.compose.oneoff") "True"}}{{.Name}}|{{
        .State.Status}}|{{.State.ExitCode}}|{{.RestartCount}}|{{if .State.Health}}{{.State.Health.Status}}{{end}}{{end}}' $ids
}

# The state of a container, from its line of `containers`: ready, waiting or failed.
outcome() {
    local name status code restarts health
    IFS='|' read -r name status code restarts health <<<"$1"
    case $status in
        exited | dead) [ "$code" = 0 ] && echo ready || echo failed ;;
        restarting) echo failed ;;
        running)
            case $health in
                '' | healthy) echo ready ;;
                unhealthy) echo failed ;;
                # One restart may happen; a container that restarts again will not become healthy.
                *) [ "$restarts" -lt 2 ] && echo waiting || echo failed ;;
            esac ;;
        *) echo waiting ;;
    esac
}

# Prints the last log lines of every failed container and exits, if any failed.
check() {
    local line name failed=()
    waiting=()
    while IFS= read -r line; do
        [ -n "$line" ] || continue
        name=${line%%|*}
        name=${name#/}
        case $(outcome "$line") in
            failed) failed+=("$name") ;;
            waiting) waiting+=("$name") ;;
        esac
    done <<<"$(containers "$@")"
    [ ${#failed[@]} -eq 0 ] && return
    for name in "${failed[@]}"; do
        echo "--- $name" >&2
        docker logs --tail 15 "$name" >&2 2>&1 || true
    done
    fail "failed: ${failed[*]}, whose last words are above" \
        "\`${compose[*]} logs\` has the rest, \`${compose[*]} down\` stops what runs"
}

find_compose
# Its own message names a container by its id; `check` prints the name and the log.
"${compose[@]}" "$@" up --build --detach || {
    check "$@"
    fail "\`${compose[*]} up\` failed, and says above why"
}
# Building does not count, and there is at least one check.
until_second=$((SECONDS + most_seconds))
while true; do
    check "$@"
    [ ${#waiting[@]} -gt 0 ] || { echo 'make up: every container is healthy'; exit 0; }
    [ "$SECONDS" -lt "$until_second" ] || break
    sleep 2
done
fail "not healthy after $most_seconds s: ${waiting[*]}; \`${compose[*]} logs\` says what they are at"
