//! Asks one home after another until one answers. The waiting half of `breaker.rs` and `patience.rs`.
//!
//! ```text
//! first ──ask──▶ answers: done
//!        ├─ fails ───────────────────────────────▶ the next one is asked at once
//!        ├─ its breaker opens meanwhile ─────────▶ the next one is asked at once
//!        ├─ is silent for three times its p99 ───▶ a healthy one at another home is asked too (a hedge)
//!        └─ is silent for twice as long ─────────▶ its breaker opens, the next one is asked at once
//! its breaker is open ───────────────────────────▶ the next one is asked at once
//! every breaker is open ─────────────────────────▶ every home is asked, once
//! ```
//!
//! Only the last step asks a home whose breaker is open, because a reader with no other home is never worse
//! off than without a breaker. Probes run beside the readers, so no reader waits for one.

use super::{
    VersionError,
    breaker::{Admission, Outcome, PROBE_MAX},
    home::{Home, Homes},
};
use fletch_origin::OriginError;
use futures::{StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use std::{collections::VecDeque, sync::Arc, time::Duration};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::task::TaskTracker;

/// How long a reader whose homes all have open breakers waits for the search for others.
const SEARCH_MAX: Duration = Duration::from_millis(500);

/// One thing to ask for, and the home that is asked.
#[derive(Clone)]
pub(super) struct Candidate<K> {
    pub home: Arc<Home>,
    pub key: K,
}

/// Further candidates, and whether there are no others beside those given so far.
pub(super) struct Found<K> {
    pub candidates: Vec<Candidate<K>>,
    pub all: bool,
}

/// What a race asks.
pub(super) trait Choices: Sync {
    type Key: Clone + Send + Sync;
    type Value: Send;

    /// Asks one candidate. Dropping the future ends the call.
    fn ask(&self, key: &Self::Key) -> BoxFuture<'static, Result<Self::Value, VersionError>>;

    /// Makes a small call to a candidate's home, whose health records the outcome.
    fn probe(&self, key: &Self::Key) -> BoxFuture<'static, ()>;

    /// Finds candidates that were not given before. `fresh` repeats an old search.
    fn more(&self, fresh: bool) -> BoxFuture<'_, Found<Self::Key>>;
}

/// The end of a race.
pub(super) struct Finish<K, T> {
    /// The answer, and who gave it.
    pub won: Option<(K, T)>,
    /// Candidates that had not answered yet, or were not asked.
    pub left: Vec<Candidate<K>>,
    /// The homes whose answers were errors, or that were silent until the deadline.
    pub failed: Vec<(Arc<Home>, VersionError)>,
}

struct Call<K> {
    candidate: Candidate<K>,
    begun: Instant,
    /// When a hedge is due. `None` after it was considered.
    hedge_at: Option<Instant>,
    /// When the silence counts as a failure. `None` after it was considered.
    silent_at: Option<Instant>,
    /// Whether the race goes on without this call, which may answer all the same.
    given_up: bool,
    ended: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Need {
    Nothing,
    /// A healthy candidate at a home that is not being asked, if the budget allows.
    Hedge,
    /// Any candidate.
    Next,
}

/// A running call, by its index in `Race::calls`.
type Running<'a, T> = BoxFuture<'a, (usize, Result<T, VersionError>)>;

struct Race<'a, C: Choices> {
    choices: &'a C,
    tasks: &'a TaskTracker,
    ready: VecDeque<Candidate<C::Key>>,
    calls: Vec<Call<C::Key>>,
    running: FuturesUnordered<Running<'a, C::Value>>,
    failed: Vec<(Arc<Home>, VersionError)>,
    need: Need,
    /// Whether a stale and a fresh search found all that they can find.
    searched: [bool; 2],
}

/// A search: whether it is fresh, when it began, and its result.
type Search<'a, K> = (bool, Instant, BoxFuture<'a, Found<K>>);

/// Waits for the search, or for ever without one.
async fn found_by<K>(search: &mut Option<Search<'_, K>>) -> Found<K> {
    match search {
        Some((_, _, found)) => found.await,
        None => std::future::pending().await,
    }
}

/// Asks the candidates until one answers, all have failed, or the deadline has passed.
pub(super) async fn race<C: Choices>(
    homes: &Homes,
    tasks: &TaskTracker,
    choices: &C,
    ready: Vec<Candidate<C::Key>>,
    deadline: Instant,
) -> Finish<C::Key, C::Value> {
    let mut openings = homes.openings();
    let mut race = Race {
        choices,
        tasks,
        ready: ready.into(),
        calls: Vec::new(),
        running: FuturesUnordered::new(),
        failed: Vec::new(),
        need: Need::Next,
        searched: [false; 2],
    };
    let mut search: Option<Search<'_, C::Key>> = None;
    loop {
        if let Some(fresh) = race.start(search.is_some())
            && search.is_none()
        {
            search = Some((fresh, Instant::now(), choices.more(fresh)));
        }
        if race.running.is_empty() && search.is_none() {
            return race.finish(None);
        }
        let timer = race.next_timer();
        let patient = search.as_ref().map(|(_, since, _)| *since + SEARCH_MAX);
        tokio::select! {
            biased;
            Some((index, result)) = race.running.next() => {
                race.calls[index].ended = true;
                match result {
                    Ok(value) => return race.finish(Some((index, value))),
                    Err(e) => {
                        race.failed.push((Arc::clone(&race.calls[index].candidate.home), e));
                        // A call that was given up was replaced already.
                        if !race.calls[index].given_up || race.running.is_empty() {
                            race.need = Need::Next;
                        }
                    }
                }
            }
            found = found_by(&mut search) => {
                if let Some((fresh, ..)) = search.take()
                    && found.all
                {
                    race.searched[0] = true;
                    race.searched[1] |= fresh;
                }
                race.ready.extend(found.candidates);
            }
            () = sleep_until(timer.unwrap_or(deadline)), if timer.is_some() => race.on_timer(),
            () = sleep_until(patient.unwrap_or(deadline)),
                if patient.is_some() && race.running.is_empty() && race.need == Need::Next =>
            {
                race.start_everywhere();
                // Only once: the search goes on beside the calls.
                if let Some((_, since, _)) = &mut search {
                    *since = deadline;
                }
            }
            Ok(()) = openings.changed() => race.on_opening(),
            () = sleep_until(deadline) => return race.finish(None),
        }
    }
}

impl<C: Choices> Race<'_, C> {
    /// Starts what is needed. Returns which search is needed for it: a stale (`false`) or a fresh one.
    fn start(&mut self, searching: bool) -> Option<bool> {
        match self.need {
            Need::Nothing => None,
            Need::Hedge => match self.pick(true) {
                Some(at) => {
                    self.need = Need::Nothing;
                    // The home that is slow pays for the hedge.
                    let slow = self.calls.iter().rev().find(|c| !c.ended);
                    if slow.is_some_and(|c| c.candidate.home.take_hedge()) {
                        self.call(at);
                    }
                    None
                }
                None if self.searched[0] => {
                    self.need = Need::Nothing;
                    None
                }
                None => Some(false),
            },
            Need::Next => match self.pick(false) {
                Some(at) => {
                    self.need = Need::Nothing;
                    self.call(at);
                    None
                }
                // An old search may do, as long as nothing that it found has failed.
                None if !self.searched[1] => Some(!self.calls.is_empty() || self.searched[0]),
                None if searching => None,
                None => {
                    self.need = Need::Nothing;
                    self.start_everywhere();
                    None
                }
            },
        }
    }

    /// Returns the position of the first candidate whose home is healthy and did not fail in this race.
    ///
    /// `elsewhere` leaves out homes that are being asked. Starts the probes that are due.
    fn pick(&self, elsewhere: bool) -> Option<usize> {
        self.ready.iter().position(|c| {
            let same = |home: &Arc<Home>| Arc::ptr_eq(home, &c.home);
            let outage = self.failed.iter().any(|(home, e)| e.is_outage() && same(home));
            let asked = self.calls.iter().any(|call| !call.ended && same(&call.candidate.home));
            if outage || (elsewhere && asked) {
                return false;
            }
            match c.home.admit() {
                Admission::Ask => true,
                Admission::Leave => false,
                Admission::Probe => {
                    let (probe, home) = (self.choices.probe(&c.key), Arc::clone(&c.home));
                    self.tasks.spawn(async move {
                        let within = home.patience().1.max(Duration::from_secs(5)).min(PROBE_MAX);
                        if timeout(within, probe).await.is_err() {
                            home.report(Outcome::Silent);
                        }
                    });
                    false
                }
            }
        })
    }

    /// Asks one candidate of each home that is not being asked: every home failed or has an open breaker.
    ///
    /// Another candidate of a home that failed in this race is asked when nothing else runs.
    fn start_everywhere(&mut self) {
        let mut at = 0;
        while at < self.ready.len() {
            let home = &self.ready[at].home;
            let asked = self.calls.iter().any(|c| !c.ended && Arc::ptr_eq(&c.candidate.home, home));
            if asked {
                at += 1;
            } else {
                self.call(at);
            }
        }
    }

    fn call(&mut self, at: usize) {
        let Some(candidate) = self.ready.remove(at) else { return };
        let (index, asked, begun) = (self.calls.len(), self.choices.ask(&candidate.key), Instant::now());
        let healthy = candidate.home.is_healthy();
        let (hedge, silent) = candidate.home.patience();
        self.running.push(Box::pin(async move { (index, asked.await) }));
        self.calls.push(Call {
            candidate,
            begun,
            hedge_at: healthy.then(|| begun + hedge),
            silent_at: healthy.then(|| begun + silent),
            given_up: !healthy,
            ended: false,
        });
    }

    fn next_timer(&self) -> Option<Instant> {
        let running = self.calls.iter().filter(|c| !c.ended);
        running.flat_map(|c| [c.hedge_at, c.silent_at]).flatten().min()
    }

    fn on_timer(&mut self) {
        let now = Instant::now();
        for index in 0..self.calls.len() {
            let call = &mut self.calls[index];
            if call.ended {
                continue;
            }
            if call.hedge_at.take_if(|at| *at <= now).is_some()
                && !call.given_up
                && self.need == Need::Nothing
            {
                self.need = Need::Hedge;
            }
            if call.silent_at.take_if(|at| *at <= now).is_some() {
                let home = Arc::clone(&call.candidate.home);
                let elsewhere = self.pick(true).is_some()
                    || self.calls.iter().any(|c| !c.ended && !Arc::ptr_eq(&c.candidate.home, &home));
                // A reader with one home waits for it, however slow it is.
                if elsewhere && !self.calls[index].given_up {
                    self.calls[index].given_up = true;
                    home.report(Outcome::Silent);
                    self.need = Need::Next;
                }
            }
        }
    }

    /// Gives up calls to homes whose breakers opened since the calls began.
    fn on_opening(&mut self) {
        for call in self.calls.iter_mut().filter(|c| !c.ended && !c.given_up) {
            if !call.candidate.home.is_healthy() {
                call.given_up = true;
                self.need = Need::Next;
            }
        }
    }

    fn finish(mut self, won: Option<(usize, C::Value)>) -> Finish<C::Key, C::Value> {
        let winner = won.as_ref().map(|(index, _)| *index);
        let home_of = |index: usize| Arc::clone(&self.calls[index].candidate.home);
        let by = winner.map(home_of);
        for call in self.calls.iter().filter(|c| !c.ended) {
            let (home, silent) = (&call.candidate.home, call.begun.elapsed());
            match &by {
                Some(by) if !Arc::ptr_eq(by, home) && silent >= home.patience().0 => {
                    home.report(Outcome::Overtaken(silent));
                }
                Some(_) => {}
                None => {
                    let (what, why) = (home.uri().to_string(), format!("no answer within {silent:.1?}"));
                    let e = OriginError::Unavailable { what, why };
                    self.failed.push((Arc::clone(home), VersionError::Origin(e)));
                }
            }
        }
        let left = self.calls.iter().filter(|c| !c.ended).map(|c| c.candidate.clone());
        let left = left.chain(self.ready).collect();
        let won = won.map(|(index, value)| (self.calls[index].candidate.key.clone(), value));
        Finish { won, left, failed: self.failed }
    }
}

#[cfg(test)]
mod tests;
