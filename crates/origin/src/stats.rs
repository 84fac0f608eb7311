//! Counters of the calls to all origins.

use crate::OriginError;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

/// Counters of the calls to all origins, since the start of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OriginStats {
    /// Requests sent to stores, and operations on local files.
    ///
    /// Each attempt and each page of a listing counts.
    pub requests: u64,
    /// Those of the requests that were sent to stores and servers.
    pub store_requests: u64,
    /// Attempts after the first.
    pub retries: u64,
    /// Pauses after an origin asked clients to slow down.
    pub pauses: u64,
    /// Times that changed credentials were read.
    pub credentials_read: u64,
    /// Bytes of objects received, including answers that were then rejected.
    pub bytes_read: u64,
    /// Bytes of objects written.
    pub bytes_written: u64,
    /// Calls that failed with [`OriginError::NotFound`].
    pub not_found: u64,
    /// Calls that failed with [`OriginError::AlreadyExists`].
    pub already_exists: u64,
    /// Calls that failed with [`OriginError::Changed`].
    pub changed: u64,
    /// Calls that failed with [`OriginError::Denied`].
    pub denied: u64,
    /// Calls that failed with [`OriginError::Invalid`].
    pub invalid: u64,
    /// Calls that failed with [`OriginError::Throttled`].
    pub throttled: u64,
    /// Calls that failed with [`OriginError::Unavailable`].
    pub unavailable: u64,
    /// Calls that failed with [`OriginError::WrongAnswer`].
    pub wrong_answer: u64,
    /// By how many seconds the clock of the store that answered last is ahead, by the `Date` of its answer.
    pub clock_ahead_s: Option<i64>,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// The `clock_ahead_s` of the last answer with a date.
    clock_ahead_s: Mutex<Option<i64>>,
    pub requests: AtomicU64,
    store_requests: AtomicU64,
    pub retries: AtomicU64,
    pub pauses: AtomicU64,
    pub credentials_read: AtomicU64,
    pub bytes_read: AtomicU64,
    pub bytes_written: AtomicU64,
    errors: [AtomicU64; 8],
}

impl Counters {
    /// Counts an operation on local files.
    pub fn request(&self) {
        self.requests.fetch_add(1, Relaxed);
    }

    /// Counts a request to a store.
    pub fn store_request(&self) {
        self.request();
        self.store_requests.fetch_add(1, Relaxed);
    }

    pub fn read(&self, bytes: u64) {
        self.bytes_read.fetch_add(bytes, Relaxed);
    }

    pub fn wrote(&self, bytes: u64) {
        self.bytes_written.fetch_add(bytes, Relaxed);
    }

    /// Records the `Date` of an answer that arrived at `now`.
    pub fn dated(&self, date: SystemTime, now: SystemTime) {
        let seconds = |span: Duration| i64::try_from(span.as_secs()).unwrap_or(i64::MAX);
        let ahead = match date.duration_since(now) {
            Ok(ahead) => seconds(ahead),
            Err(behind) => -seconds(behind.duration()),
        };
        *self.clock_ahead_s.lock() = Some(ahead);
    }

    pub fn failed(&self, error: &OriginError) {
        let i = match error {
            OriginError::NotFound { .. } | OriginError::NoBucket { .. } => 0,
            OriginError::AlreadyExists { .. } => 1,
            OriginError::Changed { .. } => 2,
            OriginError::Denied { .. } | OriginError::Expired { .. } => 3,
            OriginError::Invalid { .. } | OriginError::OtherRegion { .. } => 4,
            OriginError::Throttled { .. } => 5,
            OriginError::Unavailable { .. } | OriginError::GaveWay { .. } => 6,
            OriginError::WrongAnswer { .. } => 7,
        };
        self.errors[i].fetch_add(1, Relaxed);
    }

    pub fn snapshot(&self) -> OriginStats {
        let [not_found, already_exists, changed, denied, invalid, throttled, unavailable, wrong_answer] =
            self.errors.each_ref().map(|n| n.load(Relaxed));
        OriginStats {
            requests: self.requests.load(Relaxed),
            store_requests: self.store_requests.load(Relaxed),
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
            wrong_answer,
            clock_ahead_s: *self.clock_ahead_s.lock(),
        }
    }
}
