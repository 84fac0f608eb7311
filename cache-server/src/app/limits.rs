//! Every bound of the server in one value (I6), and the relations between the bounds.

use fletch_api::jobs::JOB_BODY_BYTES_MAX;
use fletch_core::manifest::CHUNK_BYTES_MAX;
use std::time::Duration;

/// The least memory in which a server works: four of the largest chunks.
pub const MEMORY_MIN: u64 = 4 * CHUNK_BYTES_MAX as u64;
/// The smallest disk tier.
pub const CACHE_MIN: u64 = 16 << 20;
/// The longest `limits.grace`. A stop takes at most 10 s, and needs the last 2 to cut connections.
pub const GRACE_MAX: Duration = Duration::from_secs(8);

/// The bytes of the announcements of all mounts together.
pub const MOUNTS_BYTES: u64 = 8 << 20;
/// The most bytes of the announcement of one mount.
pub const MOUNT_BYTES_MAX: u64 = 6 << 10;
/// The bytes that a client must take in each `limits.send_timeout`, while a reply waits for it.
pub const SEND_BYTES_MIN: u64 = 64 << 10;
/// The most hit connections. Each has a thread.
pub const HIT_CONNECTIONS_MAX: u64 = 256;
/// The most requests of all tenants that wait for another view of the cluster.
pub const VIEW_WAITS_MAX: u64 = 1024;
/// The most streams of events to admin pages of all tenants.
pub const PAGE_STREAMS_MAX: u64 = 32;
/// The most declared jobs of all tenants together.
pub const DECLARED_MAX: usize = 10_000;
/// The least memory for heads and bodies of requests.
pub const REQUEST_MEMORY_MIN: u64 = 8 << 20;
/// Connections in the probe lane of each listener.
pub const PROBES_MAX: usize = 128;
/// The most slab files that are kept open for reading.
pub const SLABS_MAX: usize = 256;
/// The fewest connections for whose open files there must be room.
const DESCRIPTORS_MIN: usize = 64;

/// Bounds in bytes, time and numbers. [`Limits::faults`] checks them before the server starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of all chunk buffers, and of data that is read ahead of being sent.
    pub memory_bytes: u64,
    /// Bytes of `memory_bytes` for prefetched data of epochs in a known order. 0: no prefetch.
    pub prefetch_bytes: u64,
    /// Bytes of version tables kept in memory.
    pub tables_bytes: u64,
    /// Bytes of version tables in the cache directory; 0: none.
    pub tables_disk_bytes: u64,
    /// The longest time of a fetch. A call to an origin ends a little sooner.
    pub io_timeout: Duration,
    /// Open connections over TCP. A further one is answered 429, or closes an idle one.
    pub connections: usize,
    /// Open connections over the unix socket.
    pub socket_connections: usize,
    /// Open connections of one source address or one tenant. A user of the socket has at most half of its.
    pub connections_per_caller: usize,
    /// Running requests for bytes. The server rejects more with 429.
    pub requests: usize,
    /// Bytes of a request's header.
    pub header_bytes: u64,
    /// Bytes of a request's body.
    pub body_bytes: u64,
    /// Content bytes of one batch.
    pub batch_bytes: u64,
    /// The longest time until the first request of a connection is authenticated, and of each later header.
    pub head_timeout: Duration,
    /// The longest wait on a connection for the next request.
    pub idle_timeout: Duration,
    /// The longest time for which a client may take no bytes of a reply.
    pub send_timeout: Duration,
    /// The longest time for which a stop waits for running replies.
    pub grace: Duration,
    /// Jobs that are known at once.
    pub jobs: usize,
    /// How long an idle job keeps its name in the accounts, and a declared job stays open.
    pub job_ttl: Duration,
    /// How long a lease lives without a renewal.
    pub lease_ttl: Duration,
    /// The longest ledger of an epoch.
    pub ledger_bytes: u64,
    /// Bytes of all traces that one run of the server writes.
    pub trace_bytes: u64,
    /// Open versions.
    pub versions: u64,
    /// Registered datasets.
    pub datasets: usize,
    /// Running calls to origins.
    pub origin_requests: usize,
    /// Running calls to one origin.
    pub origin_requests_per_origin: usize,
    /// Datasets that a tenant may search in a second for roots that are not open.
    pub root_lookups: usize,

    // Bounds of one tenant, unless its quota in the tokens file has others.
    /// Known jobs of one tenant.
    pub tenant_jobs: usize,
    /// Declared jobs of one tenant.
    pub tenant_declared_jobs: usize,
    /// Bytes of the job records and ledgers of one tenant.
    pub tenant_state_bytes: u64,
    /// Bytes of the declaration of one job.
    pub job_bytes: u64,
}

impl Limits {
    /// Returns the longest time until the head of a reply: that of a fetch, and a second for the rest.
    #[must_use]
    pub fn request_deadline(&self) -> Duration {
        self.io_timeout + Duration::from_secs(1)
    }

    /// Returns the longest time of a call to an origin, with its retries.
    ///
    /// It is a little less than that of the read that waits for it, so that the reader and the metrics get
    /// the origin's own error.
    #[must_use]
    pub fn origin_timeout(&self) -> Duration {
        self.io_timeout - self.io_timeout / 32
    }

    /// Returns the longest time of a read that may ask several origins.
    ///
    /// It lies between that of a call and that of the reader, so that the reader's error names each origin
    /// that was silent.
    #[must_use]
    pub fn homes_timeout(&self) -> Duration {
        self.io_timeout - self.io_timeout / 64
    }

    /// Returns the bytes of chunks that may wait to be appended to the disk.
    ///
    /// They are a part of `memory_bytes`, and small enough that reads have most of it.
    #[must_use]
    pub fn append_bytes(&self) -> u64 {
        (self.memory_bytes / 4).min(256 << 20)
    }

    /// Returns how many items of a batch are read at once.
    ///
    /// The number bounds the memory that a few batches hold while their first items are being sent.
    #[must_use]
    pub fn batch_ahead(&self) -> usize {
        usize::try_from(self.memory_bytes / MEMORY_MIN).unwrap_or(usize::MAX).clamp(2, 16)
    }

    /// Returns the part of `memory_bytes` for copies out of chunks, and for data that is read ahead of being
    /// sent (`read_ahead`).
    #[must_use]
    pub fn read_ahead_bytes(&self) -> u64 {
        self.memory_bytes / 8
    }

    /// Returns the part of `memory_bytes` for heads and bodies of requests (`request_memory`).
    ///
    /// A caller has at most half of it, so the smallest part has room for a body of `limits.body_bytes`.
    #[must_use]
    pub fn request_memory_bytes(&self) -> u64 {
        (self.memory_bytes / 8).max(REQUEST_MEMORY_MIN)
    }

    /// Returns the part of `memory_bytes` for chunks.
    #[must_use]
    pub fn store_bytes(&self) -> u64 {
        let others = self.read_ahead_bytes() + self.request_memory_bytes();
        self.memory_bytes.saturating_sub(others)
    }

    /// Returns the longest time until the first request of a connection is authenticated.
    #[must_use]
    pub fn first_request_timeout(&self) -> Duration {
        self.head_timeout.min(self.idle_timeout)
    }

    /// Returns the longest head that is read, so that one over `header_bytes` gets a problem as its reply.
    #[must_use]
    pub fn head_bytes_max(&self) -> usize {
        usize::try_from(2 * self.header_bytes).unwrap_or(usize::MAX)
    }

    /// Returns the open files of a server without connections.
    #[must_use]
    pub fn descriptors_besides_connections(&self) -> u64 {
        // The probe lanes, the calls to origins (each may hold a file and a connection), the slabs, and the
        // state, logs and the runtime's own.
        (2 * PROBES_MAX + 2 * self.origin_requests + SLABS_MAX + 256) as u64
    }

    /// Returns the limits with as many connections as fit into `files` open files, or `None` if too few fit.
    #[must_use]
    pub fn fit_descriptors(&self, files: u64) -> Option<Limits> {
        let room = files.checked_sub(self.descriptors_besides_connections())?;
        let room = usize::try_from(room).unwrap_or(usize::MAX);
        let wanted = self.connections + self.socket_connections;
        if wanted <= room {
            return Some(*self);
        }
        if room < DESCRIPTORS_MIN {
            return None;
        }
        let socket_connections = self.socket_connections.min(room / 4);
        Some(Limits {
            connections: self.connections.min(room - socket_connections),
            socket_connections,
            ..*self
        })
    }

    /// Returns the part of `memory_bytes` for chunks that reads fetch and replies hold.
    #[must_use]
    pub fn chunk_bytes(&self) -> u64 {
        self.store_bytes().saturating_sub(self.prefetch_bytes)
    }

    /// Returns the part of `memory_bytes` for clients' reads that wait for another server of the cluster.
    ///
    /// The rest is for reads that wait for a disk or an origin. So servers whose readers wait for each other
    /// all go on (ADR 65).
    #[must_use]
    pub fn peer_wait_bytes(&self) -> u64 {
        self.chunk_bytes() / 2
    }

    /// Returns the part of `memory_bytes` for reads of other servers that wait for a chunk's former owner.
    #[must_use]
    pub fn former_owner_wait_bytes(&self) -> u64 {
        self.chunk_bytes() / 4
    }

    /// Returns the relation that a server of a cluster needs besides [`Limits::faults`], if it does not hold.
    #[must_use]
    pub fn cluster_fault(&self) -> Option<(&'static str, String)> {
        let fits = self.former_owner_wait_bytes() >= u64::from(CHUNK_BYTES_MAX);
        let why = "must be at least 128MiB in a cluster (with memory.prefetch = 25%), so that a quarter of \
                   the memory for chunks holds the largest one";
        (!fits).then(|| ("memory.max", why.to_owned()))
    }

    /// Returns every relation that does not hold, as the setting's key and what to do.
    #[must_use]
    pub fn faults(&self) -> Vec<(&'static str, String)> {
        let mut faults = Vec::new();
        let mut need = |holds: bool, key, what: &str| {
            if !holds {
                faults.push((key, what.to_owned()));
            }
        };
        let zero = Duration::ZERO;
        need(
            self.memory_bytes >= MEMORY_MIN,
            "memory.max",
            "must be at least 64MiB (four of the largest chunks)",
        );
        need(
            self.prefetch_bytes <= self.memory_bytes / 2,
            "memory.prefetch",
            "must be at most half of memory.max",
        );
        need(self.tables_bytes >= 16 << 20, "tables.memory", "must be at least 16MiB");
        need(self.io_timeout > zero, "io.timeout", "must be longer than 0s");
        need(
            (8 << 10..=64 << 10).contains(&self.header_bytes),
            "limits.header_bytes",
            "must be within 8KiB and 64KiB",
        );
        need(
            (1 << 10..=64 << 20).contains(&self.body_bytes),
            "limits.body_bytes",
            "must be within 1KiB and 64MiB",
        );
        need(
            self.body_bytes <= self.request_memory_bytes() / 2,
            "limits.body_bytes",
            "must be at most a sixteenth of memory.max, or 4MiB: one caller's requests hold no more",
        );
        need(self.head_timeout > zero, "limits.head_timeout", "must be longer than 0s");
        need(
            self.batch_bytes >= u64::from(CHUNK_BYTES_MAX),
            "limits.batch_bytes",
            "must be at least 16MiB (one of the largest chunks)",
        );
        need(self.idle_timeout > zero, "limits.idle_timeout", "must be longer than 0s");
        need(self.send_timeout > zero, "limits.send_timeout", "must be longer than 0s");
        need(self.grace <= GRACE_MAX, "limits.grace", "must be at most 8s, so that a stop takes at most 10s");
        need(
            self.lease_ttl >= Duration::from_secs(1),
            "limits.lease_ttl",
            "must be at least 1s, so that heartbeats are few",
        );
        need(self.job_ttl > zero, "limits.job_ttl", "must be longer than 0s");
        need(
            (4 << 10..=1 << 30).contains(&self.ledger_bytes),
            "limits.ledger_bytes",
            "must be within 4KiB and 1GiB",
        );
        for (n, key) in [
            (self.connections, "limits.connections"),
            (self.socket_connections, "limits.socket_connections"),
            (self.connections_per_caller, "limits.connections_per_caller"),
            (self.requests, "limits.requests"),
            (self.jobs, "limits.jobs"),
            (self.datasets, "limits.datasets"),
            (self.origin_requests, "limits.origin_requests"),
            (self.root_lookups, "limits.root_lookups"),
            (usize::try_from(self.versions).unwrap_or(usize::MAX), "limits.versions"),
        ] {
            need((1..=1 << 20).contains(&n), key, "must be within 1 and 1048576");
        }
        need(
            (1..=self.origin_requests).contains(&self.origin_requests_per_origin),
            "limits.origin_requests_per_origin",
            "must be within 1 and limits.origin_requests, or a part of it such as 75%",
        );
        self.tenant_faults(&mut need);
        faults
    }

    /// Checks the bounds of one tenant.
    fn tenant_faults(&self, need: &mut impl FnMut(bool, &'static str, &str)) {
        need(
            (1 << 10..=JOB_BODY_BYTES_MAX as u64).contains(&self.job_bytes),
            "limits.job_bytes",
            "must be within 1KiB and 64MiB",
        );
        need(
            self.tenant_state_bytes >= self.ledger_bytes.max(self.job_bytes),
            "limits.tenant_state_bytes",
            "must be at least limits.ledger_bytes and limits.job_bytes, so that one job fits",
        );
        need((1..=1 << 20).contains(&self.tenant_jobs), "limits.tenant_jobs", "must be within 1 and 1048576");
        need(
            (1..=DECLARED_MAX).contains(&self.tenant_declared_jobs),
            "limits.tenant_declared_jobs",
            "must be within 1 and 10000",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::app::config::{self, Action, Environment};

    fn limits() -> Limits {
        let environment = Environment { home: Some("/home/u".into()), ..Environment::default() };
        match config::read(["fletch-server"], &environment) {
            Ok(Action::Serve(config)) => config.limits,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn connections_are_lowered_to_the_open_files_of_the_process() {
        let limits = limits();
        assert_eq!(limits.fit_descriptors(1 << 20), Some(limits));
        let few = limits.fit_descriptors(4096).expect("enough to serve");
        assert!(few.connections < limits.connections && few.socket_connections <= limits.socket_connections);
        let used = few.connections + few.socket_connections;
        assert_eq!(used as u64 + few.descriptors_besides_connections(), 4096);
        assert_eq!(limits.fit_descriptors(256), None);
    }

    #[test]
    fn the_parts_of_memory_fit_into_the_smallest_server() {
        let limits = Limits { memory_bytes: MEMORY_MIN, prefetch_bytes: 0, ..limits() };
        assert!(limits.store_bytes() >= 2 * u64::from(CHUNK_BYTES_MAX));
        assert_eq!(limits.request_memory_bytes() / 2, limits.body_bytes);
        assert_eq!(limits.faults(), Vec::new());
    }
}
