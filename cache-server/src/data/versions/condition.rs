//! Decides whether an origin fails, by the outcomes of the calls to it. Pure: the caller passes `now`.
//!
//! The breaker decides whether the server asks a home. The condition is what people see of it: one failed
//! call suffices, whatever the breaker does.
//!
//! Invariants:
//! 1. A home fails from a failed call on, and works again from the next call that it answers.
//! 2. A call that is silent for [`SILENT_AFTER`] counts as failed while it runs. A call that its caller gave
//!    up after [`GIVEN_UP_MIN`] counts as failed, too.
//! 3. A missing object is an answer, unless the version's tables say that the object exists. A changed object
//!    is an answer always: its file fails, not the home.

use fletch_origin::OriginError;
use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};
use tokio::time::Instant;

/// A call without an answer counts as failed after this time.
pub const SILENT_AFTER: Duration = Duration::from_secs(6);
/// A call that its caller gave up counts as failed if it was silent for this long.
pub const GIVEN_UP_MIN: Duration = Duration::from_secs(1);
/// A home that fails and that nobody asks is probed this often.
pub const PROBE_EVERY: Duration = Duration::from_secs(5);
/// The most characters of an error that are kept.
const WHY_MAX: usize = 500;

/// The last failed call of a home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastError {
    /// The error, which names the object.
    pub why: String,
    /// When the call failed.
    pub at: SystemTime,
}

/// What a home shows of itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConditionView {
    /// Whether the home fails now.
    pub failing: bool,
    /// Calls to the home, those of probes included.
    pub calls: u64,
    /// Calls that failed.
    pub failed: u64,
    /// The last failed call.
    pub last_error: Option<LastError>,
}

/// The outcomes of the calls to one home.
#[derive(Debug, Default)]
pub struct Condition {
    running: BTreeMap<u64, Instant>,
    calls: u64,
    failed: u64,
    answered_at: Option<Instant>,
    ended_at: Option<Instant>,
    failing: bool,
    last_error: Option<LastError>,
    /// The path of the last failed call, and whether the tables say that it exists.
    failed_path: Option<(String, bool)>,
}

impl Condition {
    /// Records that a call begins. Returns its number.
    pub fn begin(&mut self, now: Instant) -> u64 {
        self.calls += 1;
        self.running.insert(self.calls, now);
        self.calls
    }

    /// Records the result of a call. `exists` says that the tables name the object.
    pub fn end(
        &mut self,
        call: u64,
        (path, exists): (&str, bool),
        error: Option<&OriginError>,
        (now, time): (Instant, SystemTime),
    ) {
        self.running.remove(&call);
        self.ended_at = Some(now);
        let is_answer = |e: &&OriginError| match e {
            OriginError::NotFound { .. } => !exists,
            OriginError::Changed { .. } => true,
            _ => false,
        };
        match error.filter(|e| !is_answer(e)) {
            None => {
                self.answered_at = Some(now);
                self.failing = false;
            }
            Some(error) => self.fail(error.to_string(), (path, exists), time),
        }
    }

    /// Records that the caller of a call no longer waits for it.
    pub fn give_up(&mut self, call: u64, at: (&str, bool), (now, time): (Instant, SystemTime)) {
        let Some(begun) = self.running.remove(&call) else { return };
        self.ended_at = Some(now);
        let silent = now.saturating_duration_since(begun);
        if silent >= GIVEN_UP_MIN && self.answered_at.is_none_or(|t| t < begun) {
            self.fail(format!("{}: no answer in {silent:.1?}", at.0), at, time);
        }
    }

    fn fail(&mut self, why: String, (path, exists): (&str, bool), at: SystemTime) {
        self.failed += 1;
        self.failing = true;
        self.last_error = Some(LastError { why: why.chars().take(WHY_MAX).collect(), at });
        self.failed_path = Some((path.to_owned(), exists));
    }

    /// Returns the time for which the oldest running call is silent, if that is too long.
    fn silent(&self, now: Instant) -> Option<Duration> {
        let begun = *self.running.values().next()?;
        let silent = now.saturating_duration_since(begun);
        let answered = self.answered_at.is_some_and(|t| t >= begun);
        (silent >= SILENT_AFTER && !answered).then_some(silent)
    }

    /// Returns what the home shows of itself.
    pub fn view(&self, (now, time): (Instant, SystemTime)) -> ConditionView {
        let silent = self.silent(now);
        let hangs = silent.map(|silent| LastError { why: format!("no answer for {silent:.0?}"), at: time });
        ConditionView {
            failing: self.failing || silent.is_some(),
            calls: self.calls,
            failed: self.failed,
            last_error: hangs.or_else(|| self.last_error.clone()),
        }
    }

    /// Returns the path to probe, and whether it should exist, if a probe of the failing home is due.
    pub fn probe_due(&self, now: Instant) -> Option<(String, bool)> {
        let quiet = self.ended_at.is_none_or(|at| now.saturating_duration_since(at) >= PROBE_EVERY);
        if !self.failing || !self.running.is_empty() || !quiet {
            return None;
        }
        self.failed_path.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unavailable() -> OriginError {
        OriginError::Unavailable { what: "s3://b/x".into(), why: "refused".into() }
    }

    #[test]
    fn one_failed_call_shows_until_the_next_answer() {
        let (begin, time, mut c) = (Instant::now(), SystemTime::now(), Condition::default());
        let at = |s| (begin + Duration::from_secs(s), time + Duration::from_secs(s));
        let call = c.begin(at(0).0);
        c.end(call, ("x", true), None, at(1));
        assert_eq!(c.view(at(1)), ConditionView { calls: 1, ..ConditionView::default() });
        let call = c.begin(at(2).0);
        c.end(call, ("x", true), Some(&unavailable()), at(3));
        let view = c.view(at(4));
        assert!(view.failing && view.failed == 1, "{view:?}");
        let last = view.last_error.expect("an error");
        assert_eq!((last.why.as_str(), last.at), ("s3://b/x: the origin is unavailable: refused", at(3).1));
        assert_eq!(c.probe_due(at(4).0), None, "a call has just ended");
        assert_eq!(c.probe_due(at(8).0), Some(("x".into(), true)));
        let call = c.begin(at(8).0);
        assert_eq!(c.probe_due(at(14).0), None, "one probe at a time");
        c.end(call, ("x", true), None, at(14));
        let view = c.view(at(15));
        assert!(!view.failing && view.last_error.is_some(), "the last error stays visible: {view:?}");
    }

    #[test]
    fn a_missing_object_is_an_answer_unless_it_should_exist() {
        let (now, mut c) = ((Instant::now(), SystemTime::now()), Condition::default());
        let gone = OriginError::NotFound { what: "tag".into() };
        let call = c.begin(now.0);
        c.end(call, ("tag", false), Some(&gone), now);
        assert!(!c.view(now).failing);
        let changed = OriginError::Changed { what: "object".into(), why: "8 bytes now".into() };
        let call = c.begin(now.0);
        c.end(call, ("object", true), Some(&changed), now);
        assert_eq!(c.view(now), ConditionView { calls: 2, ..ConditionView::default() });
        let call = c.begin(now.0);
        c.end(call, ("object", true), Some(&gone), now);
        assert!(c.view(now).failing);
    }

    #[test]
    fn silence_shows_while_the_call_runs() {
        let (begin, time, mut c) = (Instant::now(), SystemTime::now(), Condition::default());
        let at = |s| (begin + Duration::from_secs(s), time + Duration::from_secs(s));
        let (slow, other) = (c.begin(at(0).0), c.begin(at(1).0));
        assert!(!c.view(at(5)).failing && c.view(at(6)).failing);
        c.end(other, ("y", true), None, at(7));
        assert!(!c.view(at(8)).failing, "the home answers other calls");
        c.give_up(slow, ("x", true), at(9));
        assert!(!c.view(at(9)).failing);
        let silent = c.begin(at(10).0);
        c.give_up(silent, ("x", true), at(12));
        assert!(c.view(at(12)).failing, "nobody waits any more, and the home never answered");
    }
}
