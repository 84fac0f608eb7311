//! Decides when reads stop waiting for a server that is gone. Pure: the caller passes `now`.
//!
//! ```text
//!           a call waited its whole time               the probe got no answer
//!   CLOSED ────────────────────────────▶ SUSPECTED ────────────────────────────▶ OPEN
//!     ▲                                      │                                    │
//!     └────────────────────────── any answer of the server ───────────────────────┘
//! ```
//!
//! The pattern is M. Nygard's circuit breaker ("Release It!", 2007).
//!
//! Invariants:
//! 1. A call is refused only while the breaker is open. It opens only after a call waited its whole time in
//!    vain and a probe got no answer. So a server that restarts in time is waited for.
//! 2. Any answer closes it, whatever the answer says.
//! 3. A call that waits for [`NOTICE_AFTER`] causes a probe, at most one in [`NOTICE_EVERY`]. If the probe
//!    gets no answer, that is to be logged.

use std::{collections::BTreeMap, time::Duration};
use tokio::time::Instant;

/// How long a call waits before the server is probed. With the probe and the tick this stays below 2 s.
pub const NOTICE_AFTER: Duration = Duration::from_millis(700);
/// The shortest time between two probes because of waiting calls.
pub const NOTICE_EVERY: Duration = Duration::from_secs(10);
/// The time between two probes of a server that is gone.
pub const PROBE_EVERY: Duration = Duration::from_secs(1);

/// The outcome of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The server answered, with bytes or with an error.
    Answered,
    /// The server gave no answer in the whole time of the call.
    Silent,
    /// The caller left before the call ended.
    Left,
}

/// A change that is logged once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Calls wait for the server, which does not answer.
    Waiting {
        /// The calls that wait.
        calls: usize,
        /// How long the first of them has waited.
        longest: Duration,
    },
    /// Calls are refused from now on.
    Refusing,
    /// The server answers again.
    Back {
        /// How long it was known to be silent.
        silent: Duration,
    },
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    Closed,
    Suspected,
    Open { since: Instant },
}

/// The breaker that all calls of a mount share.
#[derive(Debug)]
pub struct ServerBreaker {
    phase: Phase,
    /// The calls in flight, by number, with their starts.
    waiting: BTreeMap<u64, Instant>,
    next: u64,
    probed: Option<Instant>,
    /// The start of the first call that got no answer, since the server last answered.
    silent_since: Option<Instant>,
    /// The longest time of a call.
    call_max: Duration,
}

impl ServerBreaker {
    /// Returns a closed breaker for calls that last at most `call_max`.
    #[must_use]
    pub fn new(call_max: Duration) -> Self {
        ServerBreaker {
            phase: Phase::Closed,
            waiting: BTreeMap::new(),
            next: 0,
            probed: None,
            silent_since: None,
            call_max,
        }
    }

    /// Returns the number of a new call.
    ///
    /// # Errors
    /// The call is refused. The value says for how long the server has been silent.
    pub fn begin(&mut self, now: Instant) -> Result<u64, Duration> {
        if let Phase::Open { since } = self.phase {
            return Err(now.saturating_duration_since(self.silent_since.unwrap_or(since)));
        }
        self.next += 1;
        self.waiting.insert(self.next, now);
        Ok(self.next)
    }

    /// Ends a call. Returns the change to log, if there is one.
    pub fn end(&mut self, call: u64, outcome: Outcome, now: Instant) -> Option<Change> {
        let begun = self.waiting.remove(&call).unwrap_or(now);
        let waited = now.saturating_duration_since(begun);
        let silent = match outcome {
            Outcome::Answered => return self.answered(now),
            Outcome::Silent => true,
            // The caller has a deadline of its own, a little after that of the call.
            Outcome::Left => waited >= self.call_max.mul_f64(0.9),
        };
        if silent && self.phase == Phase::Closed {
            self.phase = Phase::Suspected;
            self.silent_since.get_or_insert(begun);
        }
        None
    }

    /// Returns whether to probe the server now. The caller then reports with [`ServerBreaker::probed`].
    #[must_use]
    pub fn probe_due(&self, now: Instant) -> bool {
        let passed = |span| self.probed.is_none_or(|at| now.saturating_duration_since(at) >= span);
        match self.phase {
            Phase::Suspected => true,
            Phase::Open { .. } => passed(PROBE_EVERY),
            Phase::Closed => self.longest(now) >= NOTICE_AFTER && passed(NOTICE_EVERY),
        }
    }

    /// Records whether a probe got an answer. Returns the change to log, if there is one.
    pub fn probed(&mut self, has_answer: bool, now: Instant) -> Option<Change> {
        self.probed = Some(now);
        if has_answer {
            return self.answered(now);
        }
        match self.phase {
            Phase::Open { .. } => None,
            Phase::Suspected => {
                self.phase = Phase::Open { since: now };
                Some(Change::Refusing)
            }
            Phase::Closed => {
                let first = self.waiting.values().min().copied()?;
                self.silent_since.get_or_insert(first);
                Some(Change::Waiting { calls: self.waiting.len(), longest: self.longest(now) })
            }
        }
    }

    /// Returns whether calls are refused.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open { .. })
    }

    /// Returns whether no call waits and the server is not suspected, so that nothing is due.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.phase == Phase::Closed && self.waiting.is_empty()
    }

    fn answered(&mut self, now: Instant) -> Option<Change> {
        self.phase = Phase::Closed;
        let since = self.silent_since.take()?;
        // The next silence is logged without delay.
        self.probed = None;
        Some(Change::Back { silent: now.saturating_duration_since(since) })
    }

    fn longest(&self, now: Instant) -> Duration {
        self.waiting.values().min().map_or(Duration::ZERO, |begun| now.saturating_duration_since(*begun))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_secs(30);

    fn after(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    #[test]
    fn a_waiting_call_is_noticed_within_two_seconds_and_not_too_often() {
        let (mut b, t) = (ServerBreaker::new(MAX), Instant::now());
        let call = b.begin(t).expect("closed");
        assert!(!b.probe_due(after(t, 600)) && b.probe_due(after(t, 700)));
        let longest = Duration::from_millis(700);
        assert_eq!(b.probed(false, after(t, 700)), Some(Change::Waiting { calls: 1, longest }));
        assert!(!b.probe_due(after(t, 9000)) && b.probe_due(after(t, 10_700)));
        let silent = Duration::from_secs(12);
        assert_eq!(b.end(call, Outcome::Answered, after(t, 12_000)), Some(Change::Back { silent }));
        // The server restarted in time: nothing was refused.
        assert!(!b.is_open() && b.is_idle());
        b.begin(after(t, 12_000)).expect("closed");
        assert!(b.probe_due(after(t, 12_700)), "the next silence is noticed at once");
    }

    #[test]
    fn a_slow_server_that_answers_probes_is_never_left_alone() {
        let (mut b, t) = (ServerBreaker::new(MAX), Instant::now());
        let call = b.begin(t).expect("closed");
        assert_eq!(b.probed(true, after(t, 700)), None);
        assert!(!b.probe_due(after(t, 10_000)), "one probe in ten seconds");
        assert_eq!(b.end(call, Outcome::Silent, after(t, 30_000)), None);
        assert!(b.probe_due(after(t, 30_000)), "a call waited in vain");
        b.begin(after(t, 30_001)).expect("not yet refused");
        assert!(matches!(b.probed(true, after(t, 30_100)), Some(Change::Back { .. })));
        assert!(!b.is_open());
    }

    #[test]
    fn calls_are_refused_from_the_first_vain_one_until_an_answer() {
        let (mut b, t) = (ServerBreaker::new(MAX), Instant::now());
        let (first, second) = (b.begin(t).expect("closed"), b.begin(after(t, 20_000)).expect("closed"));
        b.end(first, Outcome::Silent, after(t, 30_000));
        assert_eq!(b.probed(false, after(t, 30_100)), Some(Change::Refusing));
        assert_eq!(b.begin(after(t, 31_000)), Err(Duration::from_secs(31)));
        assert!(!b.probe_due(after(t, 31_000)) && b.probe_due(after(t, 31_100)));
        assert_eq!(b.probed(false, after(t, 31_100)), None, "said already");
        // A call that still waits gets an answer.
        let silent = Duration::from_secs(40);
        assert_eq!(b.end(second, Outcome::Answered, after(t, 40_000)), Some(Change::Back { silent }));
        b.begin(after(t, 40_000)).expect("closed");
    }

    #[test]
    fn a_caller_that_leaves_early_says_nothing_about_the_server() {
        let (mut b, t) = (ServerBreaker::new(MAX), Instant::now());
        let call = b.begin(t).expect("closed");
        b.end(call, Outcome::Left, after(t, 5000));
        assert!(b.is_idle());
        let call = b.begin(t).expect("closed");
        b.end(call, Outcome::Left, after(t, 29_000));
        assert!(b.probe_due(after(t, 29_000)), "its deadline passed");
    }
}
