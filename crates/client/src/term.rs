//! Until when an answer for a job counts: a server of a cluster names its term, and for how long that holds.
//!
//! The client counts from before it sent the request, on a clock that goes on in suspension. So an answer
//! that was stuck in a paused server or network is dropped, and the request is sent again. Servers that are
//! alone, and those of older builds, name no term: their answers always count.

use fletch_api::{TermStamp, headers};
use fletch_host::clock::BootTime;

/// The term of an answer, and when its request was sent.
#[derive(Debug, Clone)]
pub(crate) struct TermValidity {
    pub stamp: TermStamp,
    sent: BootTime,
}

impl TermValidity {
    /// Returns the term that an answer names, if it names one.
    pub fn of(answer: &reqwest::Response, sent: BootTime) -> Option<Self> {
        let told = answer.headers().get(headers::TERM)?.to_str().ok()?;
        Some(TermValidity { stamp: TermStamp::parse(told)?, sent })
    }

    /// Checks that the server still is the primary of the job, whatever happened since it answered.
    ///
    /// # Errors
    /// Why the answer does not count.
    pub fn check(&self) -> Result<(), String> {
        let took = self.sent.elapsed();
        if took <= self.stamp.valid {
            return Ok(());
        }
        Err(format!(
            "its answer came after {took:?} and counts for {:?}; another server may have the job since",
            self.stamp.valid
        ))
    }
}
