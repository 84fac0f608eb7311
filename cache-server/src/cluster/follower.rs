//! Whether a server follows the changes that etcd announces.
//!
//! A follower reads everything, then waits for news, and begins anew after each fault. A fault that a person
//! has to mend is logged at once, and one that should pass by itself after [`LASTS`].

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// A follower that fails for as long fails for good.
const LASTS: Duration = Duration::from_secs(60);
/// How often a fault that a person has to mend is logged.
const LOG_EVERY: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct State {
    /// Since when it fails, and why.
    fails: Option<(Instant, String)>,
    has_warned: bool,
    logged: Option<Instant>,
}

/// A task that follows a part of the cluster's keys.
#[derive(Debug)]
pub struct Follower {
    /// What it follows.
    of: &'static str,
    state: Mutex<State>,
}

impl Follower {
    /// Returns a follower that has not failed yet.
    #[must_use]
    pub fn new(of: &'static str) -> Self {
        Follower { of, state: Mutex::default() }
    }

    /// Returns what it follows: `datasets` or `jobs`.
    #[must_use]
    pub fn of(&self) -> &'static str {
        self.of
    }

    /// Notes that everything was read.
    pub fn reached(&self) {
        let mut state = self.state.lock();
        if state.fails.take().is_some() && std::mem::take(&mut state.has_warned) {
            tracing::info!(of = self.of, "this server follows the changes of its cluster again");
        }
    }

    /// Notes a failure. `needs_person`: it does not pass by itself.
    pub fn failed(&self, why: &str, needs_person: bool) {
        let (of, mut state) = (self.of, self.state.lock());
        let since = state.fails.as_ref().map_or_else(Instant::now, |(since, _)| *since);
        state.fails = Some((since, why.to_owned()));
        if needs_person && state.logged.is_none_or(|at| at.elapsed() >= LOG_EVERY) {
            state.logged = Some(Instant::now());
            tracing::error!(of, error = why, "changes of the cluster are not noted; the server tries again");
        }
        if since.elapsed() >= LASTS && !state.has_warned {
            state.has_warned = true;
            tracing::warn!(
                of,
                error = why,
                "this server has not followed the changes of its cluster for a minute; it goes on with what \
                 it knew, and tries again"
            );
        }
        tracing::debug!(of, error = why, "the keys of the cluster are read again");
    }

    /// Returns for how long it has failed, and why, if that is longer than a minute.
    #[must_use]
    pub fn problem(&self) -> Option<(Duration, String)> {
        let state = self.state.lock();
        let (since, why) = state.fails.as_ref()?;
        let lasts = since.elapsed();
        (lasts >= LASTS).then(|| (lasts, why.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_follower_that_fails_for_a_minute_is_a_problem_until_it_reads_again() {
        let follower = Follower::new("jobs");
        follower.failed("etcd is away", false);
        assert_eq!(follower.problem(), None);
        let now = Instant::now();
        follower.state.lock().fails = Some((now.checked_sub(LASTS).expect("a time"), String::new()));
        follower.failed("etcd is away", false);
        let (lasts, why) = follower.problem().expect("it lasts");
        assert!(lasts >= LASTS && why == "etcd is away" && follower.state.lock().has_warned);
        follower.reached();
        assert!(follower.problem().is_none() && !follower.state.lock().has_warned);
    }
}
