#!/usr/bin/env bash
# Builds the container images of the Dockerfile. `make image` calls this script.
#
#   packaging/image.sh                         compiles within the build
#   BIN=DIR packaging/image.sh                 takes fletch, fletch-mount and fletch-server from DIR
#   BASE=IMAGE packaging/image.sh server       builds on another runtime base, and one image only
#
# IMAGE_PREFIX (localhost/) and IMAGE_TAG (the version) name the images, BUILDER the image that compiles.
# BUILD_TOOL is `podman` or `docker`; without it the script takes podman, and docker if its daemon answers.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
prefix=${IMAGE_PREFIX:-localhost/}
tag=${IMAGE_TAG:-$version}

tool=${BUILD_TOOL:-}
if [ -z "$tool" ]; then
    if command -v podman >/dev/null; then
        tool=podman
    elif command -v docker >/dev/null && docker info >/dev/null 2>&1; then
        tool=docker
    else
        echo "no program builds images: install podman, or start Docker" >&2
        exit 1
    fi
fi

arguments=(--build-arg "VERSION=$version" --build-arg "REVISION=$revision")
# The format of OCI has no HEALTHCHECK.
[ "$(basename "$tool")" = podman ] && arguments+=(--format docker)
[ -n "${BASE:-}" ] && arguments+=(--build-arg "BASE=$BASE")
context=.
if [ -n "${BIN:-}" ]; then
    context=$(mktemp -d)
    trap 'rm -rf "$context"' EXIT
    mkdir "$context/bin"
    for program in fletch fletch-mount fletch-server; do
        [ -x "$BIN/$program" ] || { echo "BIN=$BIN has no program $program: run make programs" >&2; exit 1; }
        install -m 0755 "$BIN/$program" "$context/bin/$program"
        if command -v strip >/dev/null; then strip "$context/bin/$program"; fi
    done
    # The stage that lays the files out needs a shell and certificates, which a compiler's image has, too.
    BUILDER=${BUILDER:-${BASE:-}}
    arguments+=(--build-arg BIN=bin)
fi
[ -n "${BUILDER:-}" ] && arguments+=(--build-arg "BUILDER=$BUILDER")

targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(server mount tools)
for target in "${targets[@]}"; do
    case $target in
    server) name=${prefix}fletch-server:$tag ;;
    mount) name=${prefix}fletch-mount:$tag ;;
    tools) name=${prefix}fletch:$tag ;;
    *) echo "usage: packaging/image.sh [server] [mount] [tools]" >&2 && exit 2 ;;
    esac
    "$tool" build --quiet "${arguments[@]}" --target "$target" --tag "$name" --file Dockerfile "$context" \
        >/dev/null
    echo "$name"
done
