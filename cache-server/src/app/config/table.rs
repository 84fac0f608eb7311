//! The table of settings.

use super::{
    defaults::{directory, member_id, memory, socket, state_dir},
    setting::Setting,
};

fn text<T: ToString>(v: &Option<T>) -> Option<String> {
    v.as_ref().map(T::to_string)
}

macro_rules! setting {
    ($key:literal, $flag:literal, $value:literal, $help:literal, $file:expr, $default:literal) => {
        setting!($key, $flag, $value, $help, $file, |_| $default.to_owned())
    };
    ($key:literal, $flag:literal, $value:literal, $help:literal, $file:expr, $default:expr) => {
        Setting { key: $key, flag: $flag, value: $value, help: $help, in_file: $file, default: $default }
    };
}

/// All settings, in the order in which they are shown.
pub(super) const SETTINGS: &[Setting] = &[
    setting!(
        "listen",
        "listen",
        "ADDR",
        "Address to listen on, IP:PORT, or `none` for the unix socket only; port 0 takes a free one",
        |f| text(&f.listen),
        "127.0.0.1:7380"
    ),
    setting!(
        "socket",
        "socket",
        "PATH",
        "Unix socket to listen on (mode 0660), or `none`",
        |f| text(&f.socket),
        socket
    ),
    setting!(
        "idle",
        "idle",
        "TIME",
        "After how long the server ends by itself if nobody uses it: no request, no mount, no open epoch; \
            `off`: never",
        |f| text(&f.idle),
        "off"
    ),
    setting!(
        "cache.dir",
        "cache-dir",
        "DIR",
        "Directory of the disk tier, whose content may vanish at any moment",
        |f| text(&f.cache.dir),
        |e| { directory(e, "/var/cache/fletch", e.cache_home.as_ref(), ".cache") }
    ),
    setting!(
        "cache.size",
        "cache-size",
        "SIZE|PERCENT",
        "Bytes that the disk tier may occupy, as du counts them, or a part of what its file system has to \
            spare; 0: no disk tier",
        |f| text(&f.cache.size),
        "50%"
    ),
    setting!(
        "cache.free_floor",
        "cache-free-floor",
        "SIZE|PERCENT",
        "Bytes that stay free on the file system of the disk tier, or a part of all of it",
        |f| text(&f.cache.free_floor),
        "5%"
    ),
    setting!(
        "cache.policy",
        "cache-policy",
        "POLICY",
        "Policy of the disk tier: fletch (a share for each dataset, without thrashing), lru, or pin (first \
            come, first kept)",
        |f| text(&f.cache.policy),
        "fletch"
    ),
    setting!(
        "cache.decision_interval",
        "cache-decision-interval",
        "TIME",
        "How often the server decides which dataset gets how much of the disk, 1s to 1h",
        |f| text(&f.cache.decision_interval),
        "30s"
    ),
    setting!(
        "cache.short_circuit",
        "cache-short-circuit",
        "WORD",
        "Whether mounts of this machine read the disk tier themselves, if they are of root or of the \
            server's user: auto (without a tokens file), always (also with one), or never",
        |f| text(&f.cache.short_circuit),
        "auto"
    ),
    setting!(
        "state.dir",
        "state-dir",
        "DIR",
        "Directory of registrations, jobs and ledgers, which must not vanish",
        |f| text(&f.state.dir),
        state_dir
    ),
    setting!(
        "auth.tokens",
        "auth-tokens",
        "FILE",
        "Tokens file with the principals that may connect; without one only this machine may",
        |f| text(&f.auth.tokens),
        ""
    ),
    setting!(
        "auth.hosts",
        "auth-hosts",
        "HOST[,HOST]",
        "Hosts, besides localhost and loopback addresses, by which requests may name a server without tokens",
        |f| { f.auth.hosts.as_ref().map(|h| h.join(",")) },
        ""
    ),
    setting!(
        "auth.socket_admins",
        "auth-socket-admins",
        "UID[,UID]",
        "Users that are admins on the unix socket of a server without tokens, besides root and its own; @GID \
            names a group",
        |f| { f.auth.socket_admins.as_ref().map(|u| u.join(",")) },
        ""
    ),
    setting!(
        "tls.cert_file",
        "tls-cert-file",
        "FILE",
        "Certificate of the TCP listener in PEM form, then those of CAs above it; empty: plain HTTP",
        |f| text(&f.tls.cert_file),
        ""
    ),
    setting!(
        "tls.key_file",
        "tls-key-file",
        "FILE",
        "Key of that certificate in PEM form",
        |f| text(&f.tls.key_file),
        ""
    ),
    setting!(
        "tls.client_ca_file",
        "tls-client-ca-file",
        "FILE",
        "CAs of client certificates in PEM form; if set, every request but a probe needs such a certificate",
        |f| text(&f.tls.client_ca_file),
        ""
    ),
    setting!(
        "s3.listen",
        "s3-listen",
        "ADDR",
        "Address of the read-only S3 door, IP:PORT, or `none`; it has the TLS, tokens and limits of `listen`",
        |f| text(&f.s3.listen),
        "none"
    ),
    setting!(
        "s3.bucket",
        "s3-bucket",
        "NAME",
        "Name of the one bucket of the S3 door, whose keys begin with the names of datasets",
        |f| text(&f.s3.bucket),
        "fletch"
    ),
    setting!(
        "s3.key_file",
        "s3-key-file",
        "FILE",
        "Key of 32 random bytes from which S3 credentials are derived; needed with a tokens file",
        |f| text(&f.s3.key_file),
        ""
    ),
    setting!(
        "memory.max",
        "memory",
        "SIZE",
        "Bytes of all chunks in memory, at least 64MiB [default: half the cgroup's limit, at most 2GiB]",
        |f| text(&f.memory.max),
        memory
    ),
    setting!(
        "memory.prefetch",
        "memory-prefetch",
        "SIZE|PERCENT",
        "Bytes of memory.max, or a part of it, for prefetch of epochs in a known order; at most half, 0: no \
            prefetch",
        |f| text(&f.memory.prefetch),
        "25%"
    ),
    setting!(
        "tables.memory",
        "tables-memory",
        "SIZE",
        "Bytes of version tables in memory, at least 16MiB",
        |f| text(&f.tables.memory),
        "256MiB"
    ),
    setting!(
        "tables.disk",
        "tables-disk",
        "SIZE",
        "Bytes of version tables in cache.dir, where they are searched without being loaded; 0: none",
        |f| text(&f.tables.disk),
        "8GiB"
    ),
    setting!(
        "io.timeout",
        "io-timeout",
        "TIME",
        "The longest time of a read of an origin",
        |f| text(&f.io.timeout),
        "30s"
    ),
    setting!(
        "log.format",
        "log-format",
        "FORMAT",
        "Format of log lines: text or json",
        |f| text(&f.log.format),
        "text"
    ),
    setting!(
        "log.file",
        "log-file",
        "FILE",
        "File for log lines, without colours; empty: stderr",
        |f| text(&f.log.file),
        ""
    ),
    setting!(
        "log.file_bytes_max",
        "log-file-bytes-max",
        "SIZE",
        "Bytes of the log file, at least 4KiB; a full one becomes FILE.1, in place of the older one",
        |f| text(&f.log.file_bytes_max),
        "16MiB"
    ),
    setting!(
        "log.slow_read",
        "log-slow-read",
        "TIME",
        "Reads that take this long get a log line that names where they waited; at least 1ms",
        |f| text(&f.log.slow_read),
        "5s"
    ),
    setting!(
        "trace.dir",
        "trace-dir",
        "DIR",
        "Directory for traces of sweeps, for `fletch simulate --play`; empty: no traces",
        |f| text(&f.trace.dir),
        ""
    ),
    setting!(
        "trace.bytes",
        "trace-bytes",
        "SIZE",
        "Bytes of all traces that one run of the server writes",
        |f| text(&f.trace.bytes),
        "1GiB"
    ),
    setting!(
        "local.dirs",
        "local-dirs",
        "DIR[=DOMAINS][:DIR]",
        "Directories under which datasets may be registered, with the domains that may read them: \
            /a=x,y:/b=*; empty: any, or none with a tokens file",
        |f| { f.local.dirs.as_ref().map(|d| d.join(":")) },
        ""
    ),
    setting!(
        "publish.uri",
        "publish-uri",
        "URI",
        "Where clients write version tables when they name no place; empty: STATE_DIR/tables, for clients of \
            this machine on a server without a tokens file",
        |f| text(&f.publish.uri),
        ""
    ),
    setting!(
        "dashboard.prometheus_url",
        "dashboard-prometheus-url",
        "URL",
        "Prometheus that has scraped this server, http://HOST:PORT, which the admin page shows to admins for \
            longer than an hour",
        |f| text(&f.dashboard.prometheus_url),
        ""
    ),
    setting!(
        "cluster.coordinator",
        "cluster-coordinator",
        "WORD",
        "What coordinates the servers: `embedded` (this server is alone) or `etcd`",
        |f| text(&f.cluster.coordinator),
        "embedded"
    ),
    setting!(
        "cluster.name",
        "cluster-name",
        "NAME",
        "Name of the cluster, below which its keys lie in etcd",
        |f| text(&f.cluster.name),
        "default"
    ),
    setting!(
        "cluster.id",
        "cluster-id",
        "NAME",
        "Name of this server in its cluster; the default is the host's name",
        |f| text(&f.cluster.id),
        member_id
    ),
    setting!(
        "cluster.endpoints",
        "cluster-endpoints",
        "URL[,URL]",
        "Endpoints of etcd, http://HOST:2379 or https://HOST:2379",
        |f| f.cluster.endpoints.as_ref().map(|e| e.join(",")),
        ""
    ),
    setting!(
        "cluster.advertise_url",
        "cluster-advertise-url",
        "URL",
        "URL by which clients reach this server; needed if it listens on every address",
        |f| text(&f.cluster.advertise_url),
        ""
    ),
    setting!(
        "cluster.peer_url",
        "cluster-peer-url",
        "URL",
        "URL by which other servers reach this one, if it differs",
        |f| text(&f.cluster.peer_url),
        ""
    ),
    setting!(
        "cluster.zone",
        "cluster-zone",
        "NAME",
        "Where this server runs, such as a rack or a zone",
        |f| text(&f.cluster.zone),
        ""
    ),
    setting!(
        "cluster.weight",
        "cluster-weight",
        "N|auto",
        "Share of the chunks beside the other servers; `auto`: MiB of cache.size",
        |f| text(&f.cluster.weight),
        "auto"
    ),
    setting!(
        "cluster.member_ttl",
        "cluster-member-ttl",
        "TIME",
        "After how long without a sign of life a server counts as down, 2s to 1m",
        |f| text(&f.cluster.member_ttl),
        "10s"
    ),
    setting!(
        "cluster.forget_after",
        "cluster-forget-after",
        "TIME",
        "After how long a server that is down loses its chunks, 1s to 1day",
        |f| text(&f.cluster.forget_after),
        "1m"
    ),
    setting!(
        "cluster.stale_max",
        "cluster-stale-max",
        "TIME|off",
        "After how long without etcd the server serves no datasets and jobs any more",
        |f| text(&f.cluster.stale_max),
        "off"
    ),
    setting!("cluster.user", "cluster-user", "NAME", "User of etcd", |f| text(&f.cluster.user), ""),
    setting!(
        "cluster.password_file",
        "cluster-password-file",
        "FILE",
        "File with the password of that user",
        |f| text(&f.cluster.password_file),
        ""
    ),
    setting!(
        "cluster.ca_file",
        "cluster-ca-file",
        "FILE",
        "Certificates (PEM) that sign those of etcd, in place of the system's",
        |f| text(&f.cluster.ca_file),
        ""
    ),
    setting!(
        "cluster.cert_file",
        "cluster-cert-file",
        "FILE",
        "Certificate (PEM) that this server shows to etcd",
        |f| text(&f.cluster.cert_file),
        ""
    ),
    setting!(
        "cluster.key_file",
        "cluster-key-file",
        "FILE",
        "Key (PEM) of that certificate",
        |f| text(&f.cluster.key_file),
        ""
    ),
    setting!(
        "cluster.peer_token_file",
        "cluster-peer-token-file",
        "FILE",
        "File with the token of the role `peer` that this server sends to the others of its cluster",
        |f| text(&f.cluster.peer_token_file),
        ""
    ),
    setting!(
        "cluster.insecure_peers",
        "cluster-insecure-peers",
        "true|false",
        "Whether that token may go over plain HTTP to other machines",
        |f| text(&f.cluster.insecure_peers),
        "false"
    ),
    setting!(
        "cluster.peer_ca_file",
        "cluster-peer-ca-file",
        "FILE",
        "Certificates (PEM) that sign those of the other servers; empty: those of the system",
        |f| text(&f.cluster.peer_ca_file),
        ""
    ),
    setting!(
        "cluster.peer_cert_file",
        "cluster-peer-cert-file",
        "FILE",
        "Certificate (PEM) that this server shows the others, where they require one",
        |f| text(&f.cluster.peer_cert_file),
        ""
    ),
    setting!(
        "cluster.peer_key_file",
        "cluster-peer-key-file",
        "FILE",
        "Key (PEM) of that certificate",
        |f| text(&f.cluster.peer_key_file),
        ""
    ),
    setting!(
        "limits.connections",
        "limits-connections",
        "N",
        "Connections over TCP at once; more close idle ones, or are answered 429",
        |f| text(&f.limits.connections),
        "4096"
    ),
    setting!(
        "limits.socket_connections",
        "limits-socket-connections",
        "N",
        "Connections over the unix socket at once, of which one user has at most half",
        |f| text(&f.limits.socket_connections),
        "1024"
    ),
    setting!(
        "limits.connections_per_caller",
        "limits-connections-per-caller",
        "N",
        "Connections of one source address, or of one tenant",
        |f| text(&f.limits.connections_per_caller),
        "2048"
    ),
    setting!(
        "limits.requests",
        "limits-requests",
        "N",
        "Requests for bytes at once; more are rejected with 429",
        |f| text(&f.limits.requests),
        "1024"
    ),
    setting!(
        "limits.header_bytes",
        "limits-header-bytes",
        "SIZE",
        "Bytes of a request's header, 8KiB to 64KiB",
        |f| text(&f.limits.header_bytes),
        "32KiB"
    ),
    setting!(
        "limits.body_bytes",
        "limits-body-bytes",
        "SIZE",
        "Bytes of a request's body, 1KiB to 64MiB",
        |f| text(&f.limits.body_bytes),
        "4MiB"
    ),
    setting!(
        "limits.batch_bytes",
        "limits-batch-bytes",
        "SIZE",
        "Content bytes of one batch, at least 16MiB",
        |f| text(&f.limits.batch_bytes),
        "1GiB"
    ),
    setting!(
        "limits.head_timeout",
        "limits-head-timeout",
        "TIME",
        "The longest time until a connection's first request is authenticated, and for each later header",
        |f| text(&f.limits.head_timeout),
        "5s"
    ),
    setting!(
        "limits.idle_timeout",
        "limits-idle-timeout",
        "TIME",
        "The longest time for which a connection waits for a request",
        |f| text(&f.limits.idle_timeout),
        "1m"
    ),
    setting!(
        "limits.send_timeout",
        "limits-send-timeout",
        "TIME",
        "The longest time for which a client may take less than 64KiB of a reply",
        |f| text(&f.limits.send_timeout),
        "30s"
    ),
    setting!(
        "limits.grace",
        "limits-grace",
        "TIME",
        "The longest time for which a stop waits for running replies, at most 8s",
        |f| text(&f.limits.grace),
        "5s"
    ),
    setting!(
        "limits.jobs",
        "limits-jobs",
        "N",
        "Jobs that are known at once",
        |f| text(&f.limits.jobs),
        "100000"
    ),
    setting!(
        "limits.job_ttl",
        "limits-job-ttl",
        "TIME",
        "How long an idle job keeps its name in the accounts, and a declared job stays open",
        |f| text(&f.limits.job_ttl),
        "1h"
    ),
    setting!(
        "limits.lease_ttl",
        "limits-lease-ttl",
        "TIME",
        "How long a lease lives without a renewal, at least 1s",
        |f| text(&f.limits.lease_ttl),
        "30s"
    ),
    setting!(
        "limits.ledger_bytes",
        "limits-ledger-bytes",
        "SIZE",
        "The longest ledger of an epoch, 4KiB to 1GiB; a job whose plan would need more is rejected",
        |f| text(&f.limits.ledger_bytes),
        "1GiB"
    ),
    setting!("limits.versions", "limits-versions", "N", "Open versions", |f| text(&f.limits.versions), "64"),
    setting!(
        "limits.datasets",
        "limits-datasets",
        "N",
        "Registered datasets",
        |f| text(&f.limits.datasets),
        "10000"
    ),
    setting!(
        "limits.origin_requests",
        "limits-origin-requests",
        "N",
        "Calls to origins at once",
        |f| text(&f.limits.origin_requests),
        "88"
    ),
    setting!(
        "limits.origin_requests_per_origin",
        "limits-origin-requests-per-origin",
        "N|PERCENT",
        "Calls to one endpoint, bucket or file system while no other is used; a number or a part of \
            limits.origin_requests",
        |f| text(&f.limits.origin_requests_per_origin),
        "75%"
    ),
    setting!(
        "limits.root_lookups",
        "limits-root-lookups",
        "N",
        "Datasets that a tenant may search in a second for roots that are not open",
        |f| text(&f.limits.root_lookups),
        "200"
    ),
    setting!(
        "limits.tenant_jobs",
        "limits-tenant-jobs",
        "N",
        "Known jobs of one tenant; idle ones of the same tenant make room for new ones",
        |f| text(&f.limits.tenant_jobs),
        "10000"
    ),
    setting!(
        "limits.tenant_declared_jobs",
        "limits-tenant-declared-jobs",
        "N",
        "Declared jobs of one tenant, at most 10000",
        |f| text(&f.limits.tenant_declared_jobs),
        "1000"
    ),
    setting!(
        "limits.tenant_state_bytes",
        "limits-tenant-state-bytes",
        "SIZE",
        "Bytes of the job records and ledgers of one tenant, at least limits.ledger_bytes",
        |f| text(&f.limits.tenant_state_bytes),
        "8GiB"
    ),
    setting!(
        "limits.job_bytes",
        "limits-job-bytes",
        "SIZE",
        "Bytes of the declaration of a job, 1KiB to 64MiB",
        |f| text(&f.limits.job_bytes),
        "16MiB"
    ),
];
