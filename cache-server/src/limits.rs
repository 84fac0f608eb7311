//! I6: every bound of the server in one value, and the relations between them.

use fletch_core::manifest::CHUNK_BYTES_MAX;
use std::time::Duration;

/// The least memory a server works in: four of the largest chunks.
pub const MEMORY_MIN: u64 = 4 * CHUNK_BYTES_MAX as u64;
/// The smallest disk tier.
pub const CACHE_MIN: u64 = 16 << 20;
/// The longest grace: a stop takes at most 10 s, the last 2 are for ending what is left.
pub const GRACE_MAX: Duration = Duration::from_secs(8);

/// Bounds, in bytes, seconds and numbers. Checked by [`Limits::faults`] before anything starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of all chunk buffers alive, and of what is read ahead of being sent.
    pub memory_bytes: u64,
    /// Bytes of `memory_bytes` that may be fetched ahead of epochs whose order is known; 0 for none.
    pub prefetch_bytes: u64,
    /// Bytes of version tables kept in memory.
    pub tables_bytes: u64,
    /// The longest a fetch takes; a call to an origin ends a little sooner.
    pub io_timeout: Duration,
    /// Connections open at once; more wait in the kernel's queue.
    pub connections: usize,
    /// Requests for bytes at once; more are answered 429.
    pub requests: usize,
    /// Bytes of a request's header.
    pub header_bytes: u64,
    /// Bytes of a request's body.
    pub body_bytes: u64,
    /// Content bytes of one batch.
    pub batch_bytes: u64,
    /// The longest wait for a (next) request's whole header on a connection.
    pub idle_timeout: Duration,
    /// The longest time a client may take no bytes of an answer.
    pub send_timeout: Duration,
    /// The longest a stop waits for answers under way.
    pub grace: Duration,
    /// Jobs known at once.
    pub jobs: usize,
    /// How long a job without requests is remembered by name.
    pub job_ttl: Duration,
    /// How long a lease lives without a sign of life.
    pub lease_ttl: Duration,
    /// No epoch's ledger is longer.
    pub ledger_bytes: u64,
    /// Bytes of all traces of one run together.
    pub trace_bytes: u64,
    /// Versions open at once.
    pub versions: u64,
    /// Datasets registered.
    pub datasets: usize,
    /// Calls to origins at once.
    pub origin_requests: usize,
}

impl Limits {
    /// The longest a request may take until its answer's head: what it fetches for has its own
    /// deadline, and a second for everything else.
    #[must_use]
    pub fn request_deadline(&self) -> Duration {
        self.io_timeout + Duration::from_secs(1)
    }

    /// The longest a call to an origin takes, retries included: a little less than the read that waits for it, so that
    /// its reader is told, and the metrics count, what the origin did.
    #[must_use]
    pub fn origin_timeout(&self) -> Duration {
        self.io_timeout - self.io_timeout / 32
    }

    /// Bytes of chunks that wait to be appended to the disk: part of `memory_bytes`, and small enough
    /// that reads have most of it.
    #[must_use]
    pub fn append_bytes(&self) -> u64 {
        (self.memory_bytes / 4).min(256 << 20)
    }

    /// Items of a batch that are fetched at once: bounded by the share of memory that a few
    /// batches may hold while their first items are still being sent.
    #[must_use]
    pub fn batch_ahead(&self) -> usize {
        usize::try_from(self.memory_bytes / MEMORY_MIN).unwrap_or(usize::MAX).clamp(2, 16)
    }

    /// Bytes of copies out of chunks, and of samples that are read before it is their turn to be sent: a part of
    /// `memory_bytes` of its own (`read_ahead`).
    #[must_use]
    pub fn read_ahead_bytes(&self) -> u64 {
        self.memory_bytes / 8
    }

    /// Bytes of `memory_bytes` that chunks have.
    #[must_use]
    pub fn store_bytes(&self) -> u64 {
        self.memory_bytes - self.read_ahead_bytes()
    }

    /// Every relation that does not hold, as (key, what to do).
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
            (self.requests, "limits.requests"),
            (self.jobs, "limits.jobs"),
            (self.datasets, "limits.datasets"),
            (self.origin_requests, "limits.origin_requests"),
            (usize::try_from(self.versions).unwrap_or(usize::MAX), "limits.versions"),
        ] {
            need((1..=1 << 20).contains(&n), key, "must be within 1 and 1048576");
        }
        faults
    }
}
