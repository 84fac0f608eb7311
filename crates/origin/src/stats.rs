//! Counters of everything asked of origins.

use crate::OriginError;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What was asked of origins since the start of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OriginStats {
    /// Requests sent to stores and operations on local files; each attempt and page counts.
    pub requests: u64,
    /// Attempts after the first.
    pub retries: u64,
    /// Times that an origin asked to slow down and was left alone for a while.
    pub pauses: u64,
    /// Times that changed credentials were read again.
    pub credentials_read: u64,
    /// Bytes of objects received, also of answers that were then refused.
    pub bytes_read: u64,
    /// Bytes of objects written.
    pub bytes_written: u64,
    /// Calls that ended with each error.
    pub not_found: u64,
    /// See [`OriginError::AlreadyExists`].
    pub already_exists: u64,
    /// See [`OriginError::Changed`].
    pub changed: u64,
    /// See [`OriginError::Denied`].
    pub denied: u64,
    /// See [`OriginError::Invalid`].
    pub invalid: u64,
    /// See [`OriginError::Throttled`].
    pub throttled: u64,
    /// See [`OriginError::Unavailable`].
    pub unavailable: u64,
    /// See [`OriginError::Corrupt`].
    pub corrupt: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub requests: AtomicU64,
    pub retries: AtomicU64,
    pub pauses: AtomicU64,
    pub credentials_read: AtomicU64,
    pub bytes_read: AtomicU64,
    pub bytes_written: AtomicU64,
    errors: [AtomicU64; 8],
}

impl Counters {
    pub fn request(&self) {
        self.requests.fetch_add(1, Relaxed);
    }

    pub fn read(&self, bytes: u64) {
        self.bytes_read.fetch_add(bytes, Relaxed);
    }

    pub fn wrote(&self, bytes: u64) {
        self.bytes_written.fetch_add(bytes, Relaxed);
    }

    pub fn failed(&self, error: &OriginError) {
        let i = match error {
            OriginError::NotFound { .. } => 0,
            OriginError::AlreadyExists { .. } => 1,
            OriginError::Changed { .. } => 2,
            OriginError::Denied { .. } => 3,
            OriginError::Invalid { .. } => 4,
            OriginError::Throttled { .. } => 5,
            OriginError::Unavailable { .. } => 6,
            OriginError::Corrupt { .. } => 7,
        };
        self.errors[i].fetch_add(1, Relaxed);
    }

    pub fn snapshot(&self) -> OriginStats {
        let [not_found, already_exists, changed, denied, invalid, throttled, unavailable, corrupt] =
            self.errors.each_ref().map(|n| n.load(Relaxed));
        OriginStats {
            requests: self.requests.load(Relaxed),
            retries: self.retries.load(Relaxed),
            pauses: self.pauses.load(Relaxed),
            credentials_read: self.credentials_read.load(Relaxed),
            bytes_read: self.bytes_read.load(Relaxed),
            bytes_written: self.bytes_written.load(Relaxed),
            not_found,
            already_exists,
            changed,
            denied,
            invalid,
            throttled,
            unavailable,
            corrupt,
        }
    }
}
