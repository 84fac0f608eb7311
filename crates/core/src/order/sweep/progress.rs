//! What a sweep looks like from outside.

use super::SweepPolicy;

/// What the sweep looks like, for people and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct SweepProgress {
    /// Bytes the sweep has loaded since it began.
    pub swept_bytes: u64,
    /// Bytes in the window.
    pub window_bytes: u64,
    /// Bytes the window may have.
    pub window_bytes_max: u64,
    /// Bytes in the reserve.
    pub reserve_bytes: u64,
    /// Bytes the reserve may have.
    pub reserve_bytes_max: u64,
    /// Jobs that hold a subscriber.
    pub subscribers: u32,
}

impl SweepPolicy {
    /// What it looks like.
    #[must_use]
    pub fn progress(&self) -> SweepProgress {
        SweepProgress {
            swept_bytes: self.position,
            window_bytes: self.window_bytes,
            window_bytes_max: self.window_max,
            reserve_bytes: self.reserve_bytes,
            reserve_bytes_max: self.reserve_max,
            subscribers: u32::try_from(self.subscribers.iter().filter(|s| s.on).count()).unwrap_or(u32::MAX),
        }
    }
}
