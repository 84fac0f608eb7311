//! Decides when a failing home is left alone, and when it is asked again. Pure: the caller passes `now`.
//!
//! ```text
//!            Silent, a long Overtaken, or STRIKES_MAX of Failed and Overtaken in a row
//!   CLOSED ────────────────────────────────────────────────────────────────────────▶ OPEN
//!     ▲ ▲                                                                            │ ▲
//!     │ └── Answered ────────────────────────────────────────────────────────────────┤ │
//!     │                                                       the cooldown has passed│ │
//!     │                                                                              ▼ │
//!     └── Answered ◀────────────────────────────────────────────────────────── HALF-OPEN
//!                                                 Failed, Silent: twice the cooldown ──┘
//! ```
//!
//! The pattern is M. Nygard's circuit breaker ("Release It!", 2007).
//!
//! Invariants:
//! 1. An answer closes the breaker, whatever the answer says. A missing or changed object is an answer.
//! 2. At most one probe runs at a time. A probe without an outcome counts as lost after [`PROBE_MAX`].
//! 3. A cooldown lasts [`COOLDOWN_MIN`] to [`COOLDOWN_MAX`]. A breaker that opens again within
//!    [`COOLDOWN_MAX`] of closing continues with twice its last cooldown.

use std::time::Duration;
use tokio::time::Instant;

/// The first cooldown.
pub const COOLDOWN_MIN: Duration = Duration::from_secs(1);
/// The longest cooldown.
pub const COOLDOWN_MAX: Duration = Duration::from_secs(30);
/// This many failed calls in a row open the breaker. One failed call may be one damaged file.
pub const STRIKES_MAX: u32 = 3;
/// A call that was silent for this long while another home answered opens the breaker at once.
pub const OVERTAKEN_MIN: Duration = Duration::from_millis(300);
/// A probe that has no outcome after this time is lost.
pub const PROBE_MAX: Duration = Duration::from_secs(30);

/// The state of a breaker. Metrics show the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum BreakerState {
    /// The home is asked.
    Closed = 0,
    /// One probe runs. Readers leave the home alone.
    HalfOpen = 1,
    /// The home is left alone.
    Open = 2,
}

/// What a caller may do with the home now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    Ask,
    /// Leave it alone, and start the one probe.
    Probe,
    /// Leave it alone.
    Leave,
}

/// The outcome of a call to the home.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The home answered, with bytes or with a final error.
    Answered,
    /// The home could not be reached, failed, or asked to slow down until the deadline.
    Failed,
    /// Another home answered first, while this one was silent for this long.
    Overtaken(Duration),
    /// The home was silent for as long as a call may be while other homes can answer.
    Silent,
}

/// A change that is logged once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The home is left alone for this long.
    Tripped(Duration),
    /// The home is asked again. It was left alone for this long.
    Closed(Duration),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    Closed { strikes: u32 },
    Open { until: Instant },
    HalfOpen { since: Instant },
}

/// A circuit breaker.
#[derive(Debug, Clone)]
pub struct Breaker {
    phase: Phase,
    /// The cooldown of the latest opening.
    cooldown: Duration,
    /// When the breaker left `Closed`.
    opened: Option<Instant>,
    /// When the breaker entered `Closed` again.
    closed: Option<Instant>,
}

impl Default for Breaker {
    fn default() -> Self {
        let phase = Phase::Closed { strikes: 0 };
        Breaker { phase, cooldown: Duration::ZERO, opened: None, closed: None }
    }
}

impl Breaker {
    #[must_use]
    pub fn state(&self) -> BreakerState {
        match self.phase {
            Phase::Closed { .. } => BreakerState::Closed,
            Phase::Open { .. } => BreakerState::Open,
            Phase::HalfOpen { .. } => BreakerState::HalfOpen,
        }
    }

    /// Returns what a caller may do with the home. A caller that gets [`Admission::Probe`] starts the probe.
    pub fn admit(&mut self, now: Instant) -> Admission {
        let probe = match self.phase {
            Phase::Closed { .. } => return Admission::Ask,
            Phase::Open { until } => now >= until,
            Phase::HalfOpen { since } => now.saturating_duration_since(since) >= PROBE_MAX,
        };
        if !probe {
            return Admission::Leave;
        }
        self.phase = Phase::HalfOpen { since: now };
        Admission::Probe
    }

    /// Records the outcome of a call. Returns the change to log, if there is one.
    pub fn report(&mut self, outcome: Outcome, now: Instant) -> Option<Change> {
        match (self.phase, outcome) {
            (Phase::Closed { .. }, Outcome::Answered) => {
                self.phase = Phase::Closed { strikes: 0 };
                None
            }
            (_, Outcome::Answered) => {
                self.phase = Phase::Closed { strikes: 0 };
                self.closed = Some(now);
                let opened = self.opened.take().unwrap_or(now);
                Some(Change::Closed(now.saturating_duration_since(opened)))
            }
            (Phase::Closed { strikes }, outcome) => {
                let strikes = strikes + 1;
                let opens = match outcome {
                    Outcome::Overtaken(silent) => silent >= OVERTAKEN_MIN || strikes >= STRIKES_MAX,
                    Outcome::Silent => true,
                    Outcome::Failed | Outcome::Answered => strikes >= STRIKES_MAX,
                };
                if !opens {
                    self.phase = Phase::Closed { strikes };
                    return None;
                }
                let recent = self.closed.is_some_and(|at| now.saturating_duration_since(at) < COOLDOWN_MAX);
                self.cooldown = if recent { self.cooldown } else { Duration::ZERO };
                self.opened = Some(now);
                self.open(now);
                Some(Change::Tripped(self.cooldown))
            }
            (Phase::HalfOpen { .. }, Outcome::Failed | Outcome::Silent) => {
                self.open(now);
                None
            }
            // Calls that began before the breaker opened, or while every home was left alone.
            (Phase::Open { .. } | Phase::HalfOpen { .. }, _) => None,
        }
    }

    fn open(&mut self, now: Instant) {
        self.cooldown = (self.cooldown * 2).clamp(COOLDOWN_MIN, COOLDOWN_MAX);
        self.phase = Phase::Open { until: now + self.cooldown };
    }
}

#[cfg(test)]
mod tests;
