# The images of Fletch. `make image` builds them; docs/INSTALL.md explains the arguments.
#
# BASE is the runtime base of all images, BUILDER the image that compiles. BIN names a directory of the build
# context with programs that are built already: then nothing is compiled, and BUILDER needs only a shell.
ARG RUST=1.95.0
ARG BASE=debian:bookworm-slim
ARG BUILDER=rust:${RUST}-bookworm

# Lays out what the images contain below /out. Each image then copies its part, so that only `mount` and
# `tools` need a shell in their base.
FROM ${BUILDER} AS programs
ARG BIN=
WORKDIR /src
COPY . .
RUN set -eu; \
    built="$BIN"; \
    if [ -z "$BIN" ]; then \
        command -v cmake >/dev/null || { apt-get update -qq; apt-get install -y -qq cmake; }; \
        cargo build --release --locked --bins -p fletch-server -p fletch-mount -p fletch; \
        strip target/release/fletch target/release/fletch-mount target/release/fletch-server; \
        built=target/release; \
    fi; \
    install -D -m 0755 -t /out/bin "$built/fletch" "$built/fletch-mount" "$built/fletch-server"; \
    install -D -m 0644 /etc/ssl/certs/ca-certificates.crt /out/certs/ca-certificates.crt; \
    install -d -m 0700 -o 65532 -g 65532 /out/owned/var/lib/fletch /out/owned/var/cache/fletch

# The cache server. Its base needs a C library, and no shell except for HEALTHCHECK.
FROM ${BASE} AS server
ARG VERSION=0.0.0
ARG REVISION=unknown
COPY --from=programs /out/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=programs --chown=65532:65532 /out/owned/var/lib/fletch /var/lib/fletch
COPY --from=programs --chown=65532:65532 /out/owned/var/cache/fletch /var/cache/fletch
COPY --from=programs /out/bin/fletch-server /usr/bin/fletch-server
USER 65532:65532
WORKDIR /
EXPOSE 7380
# Kubernetes has probes of its own and ignores this. bash opens the connection, because a small base has no
# HTTP client.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 CMD ["/bin/bash", "-c", "\
exec 3<>/dev/tcp/127.0.0.1/7380 && \
printf 'GET /livez HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n' >&3 && \
read -r -t 2 answer <&3 && [[ $answer == 'HTTP/1.1 200'* ]]"]
ENTRYPOINT ["/usr/bin/fletch-server"]
CMD ["--state-dir", "/var/lib/fletch", "--cache-dir", "/var/cache/fletch", "--socket", "none"]
LABEL org.opencontainers.image.title="fletch-server" \
      org.opencontainers.image.description="Cache server for training datasets" \
      org.opencontainers.image.source="https://github.com/fletch-cache/fletch" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# The mount of a node. It mounts for other containers, so it runs as root.
FROM ${BASE} AS mount
ARG VERSION=0.0.0
ARG REVISION=unknown
RUN command -v fusermount3 >/dev/null || { apt-get update -qq && \
    apt-get install -y -qq --no-install-recommends fuse3 && rm -rf /var/lib/apt/lists/*; }
COPY --from=programs /out/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=programs /out/bin/fletch-mount /usr/bin/fletch-mount
USER 0:0
WORKDIR /
# The check fails if no mount of Fletch is left, or if one of them does not answer.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["/bin/sh", "-c", "\
found=1; while read -r _ dir type _; do \
case $type in fuse.fletch*) stat -f \"$dir\" >/dev/null || exit 1; found=0;; esac; \
done </proc/self/mounts; exit $found"]
ENTRYPOINT ["/usr/bin/fletch-mount"]
CMD ["--help"]
LABEL org.opencontainers.image.title="fletch-mount" \
      org.opencontainers.image.description="Read-only mounts of datasets that a Fletch server serves" \
      org.opencontainers.image.source="https://github.com/fletch-cache/fletch" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# The command `fletch`, for jobs that index or register, and for `helm test`.
FROM ${BASE} AS tools
ARG VERSION=0.0.0
ARG REVISION=unknown
COPY --from=programs /out/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=programs /out/bin/fletch /usr/bin/fletch
USER 65532:65532
WORKDIR /
# The image runs commands that end, so there is no service to check.
HEALTHCHECK NONE
ENTRYPOINT ["/usr/bin/fletch"]
CMD ["--help"]
LABEL org.opencontainers.image.title="fletch" \
      org.opencontainers.image.description="Command that indexes, packs and registers datasets" \
      org.opencontainers.image.source="https://github.com/fletch-cache/fletch" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
