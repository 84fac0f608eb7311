//! Decides which process is a rank of a job, by the loaders that requests name (`docs/EPOCHS.md`, "Loaders").
//!
//! Pure: the caller gives the time, and ends the leases of a rank that changes hands.
//!
//! ```text
//! first request ─▶ current ◀─ the current one is silent, left, or of the same process; `take_over` ─ waiting
//!                     └─ asks, acknowledges or renews ─▶ the waiting one is refused
//! ```
//!
//! 1. A rank has at most one current and one waiting loader. A third one is told to ask again.
//! 2. A loader that was replaced is refused from then on. The latest [`REPLACED_MAX`] of a rank are known.
//! 3. A waiting loader is refused only after the current one showed life while it waited.

use fletch_api::{JobLoaders, Loader, RankLoader, loaders::LOADERS_LISTED_MAX};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

/// The most replaced loaders of a rank that are known.
const REPLACED_MAX: usize = 8;
/// A waiting loader that did not ask for as long has ended, in milliseconds. A client asks every 1 to 2 s.
const WAITING_GONE_MS: u64 = 5_000;

/// What a request of a loader means for its rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sign {
    /// The loader asks for samples or acknowledges them.
    Uses,
    /// The loader renews its leases.
    Renews,
    /// The request needs no process that lives on: it only gives something back.
    None,
}

/// Why a request is not admitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The rank's loader showed life while this one waited.
    InUse {
        /// The rank's loader.
        by: Arc<Loader>,
    },
    /// Another loader took over the rank.
    Taken {
        /// The loader that took over.
        by: Arc<Loader>,
    },
    /// The rank's loader may still live.
    Waits {
        /// The rank's loader.
        by: Arc<Loader>,
        /// The time until it counts as gone, if it stays silent.
        left: Duration,
    },
}

/// What the caller does with an admitted request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admitted {
    /// The rank stays with its loader.
    Goes,
    /// The rank changed hands: the leases of the former loader end now.
    TookOver {
        /// The former loader.
        from: Arc<Loader>,
    },
}

/// The loaders of all ranks of a job.
#[derive(Debug, Default)]
pub struct RankLoaders {
    ranks: BTreeMap<u32, RankState>,
}

#[derive(Debug, Default)]
struct RankState {
    current: Option<Current>,
    waiting: Option<Waiting>,
    /// By id: replaced loaders, and the one that replaced each.
    replaced: VecDeque<(String, Arc<Loader>)>,
    /// When a client without an id last sent a request.
    unnamed_ms: Option<u64>,
}

#[derive(Debug)]
struct Current {
    loader: Arc<Loader>,
    /// When it last showed life.
    seen_ms: u64,
    has_left: bool,
    /// The job returned to a state or changed its world since it last asked, so its leases are void.
    is_void: bool,
}

#[derive(Debug)]
struct Waiting {
    loader: Arc<Loader>,
    came_ms: u64,
    asked_ms: u64,
    is_refused: bool,
}

impl RankLoaders {
    /// Decides whether a request of a rank goes on. `ranks` is the job's number of ranks.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn admit(
        &mut self,
        (rank, ranks): (u32, u32),
        loader: Option<&Loader>,
        sign: Sign,
        (now_ms, ttl_ms): (u64, u64),
    ) -> Result<Admitted, Refusal> {
        if rank >= ranks {
            // The epoch refuses such a rank.
            return Ok(Admitted::Goes);
        }
        // Ranks of a former, larger world.
        self.ranks.split_off(&ranks);
        let state = self.ranks.entry(rank).or_default();
        let Some(loader) = loader else {
            state.unnamed_ms = Some(now_ms);
            return Ok(Admitted::Goes);
        };
        state.admit(loader, sign, now_ms, ttl_ms)
    }

    /// Notes that a loader gave its rank up. Returns whether it had the rank, so that its leases end now.
    pub fn leave(&mut self, rank: u32, id: &str) -> bool {
        let Some(state) = self.ranks.get_mut(&rank) else { return false };
        state.waiting = state.waiting.take().filter(|waiting| waiting.loader.id != id);
        match &mut state.current {
            Some(current) if current.loader.id == id => {
                current.has_left = true;
                true
            }
            _ => false,
        }
    }

    /// Opens every rank to the next process that asks, because the leases of all ranks became void.
    ///
    /// A process that reads on keeps its rank by its next request.
    pub fn open_all(&mut self) {
        for current in self.ranks.values_mut().filter_map(|state| state.current.as_mut()) {
            current.is_void = true;
        }
    }

    /// Returns the loaders as the API shows them.
    #[must_use]
    pub fn view(&self, now_ms: u64) -> JobLoaders {
        let ranks = self.ranks.iter().take(LOADERS_LISTED_MAX);
        JobLoaders {
            ranks: ranks.map(|(&rank, state)| state.view(rank, now_ms)).collect(),
            total: self.ranks.len() as u64,
            unnamed: self.ranks.values().filter(|state| state.unnamed_ms.is_some()).count() as u64,
        }
    }
}

impl RankState {
    fn admit(&mut self, asked: &Loader, sign: Sign, now_ms: u64, ttl_ms: u64) -> Result<Admitted, Refusal> {
        if let Some((_, by)) = self.replaced.iter().find(|(id, _)| *id == asked.id) {
            return Err(Refusal::Taken { by: Arc::clone(by) });
        }
        let is_current = match &self.current {
            Some(current) => current.loader.id == asked.id,
            None => false,
        };
        if sign == Sign::None && !is_current {
            return Ok(Admitted::Goes);
        }
        let Some(current) = &mut self.current else {
            self.seat(asked, now_ms);
            return Ok(Admitted::Goes);
        };
        if current.loader.id == asked.id {
            if sign != Sign::None {
                current.seen_ms = now_ms;
                if let Some(waiting) = &mut self.waiting {
                    waiting.is_refused = true;
                }
            }
            // A renewal may have been sent before the loader left.
            if sign == Sign::Uses {
                (current.has_left, current.is_void) = (false, false);
            }
            return Ok(Admitted::Goes);
        }
        let by = Arc::clone(&current.loader);
        // A process that makes a second loader goes on with the second one.
        let silent_long_ms = current.seen_ms.saturating_add(2 * ttl_ms);
        let at_once = current.has_left || current.is_void || asked.take_over || by.is_same_process(asked);
        if at_once || now_ms >= silent_long_ms {
            return Ok(self.take_over(asked, now_ms));
        }
        match &mut self.waiting {
            Some(waiting) if waiting.loader.id == asked.id => {
                waiting.asked_ms = now_ms;
                if waiting.is_refused {
                    return Err(Refusal::InUse { by });
                }
                let due = waiting.came_ms.saturating_add(ttl_ms).min(silent_long_ms);
                if now_ms >= due {
                    return Ok(self.take_over(asked, now_ms));
                }
                Err(Refusal::Waits { by, left: Duration::from_millis(due - now_ms) })
            }
            Some(waiting) if !waiting.is_refused && now_ms < waiting.asked_ms + WAITING_GONE_MS => {
                Err(Refusal::Waits { by, left: Duration::from_millis(ttl_ms) })
            }
            _ => {
                let loader = Arc::new(asked.shown());
                let (came_ms, asked_ms) = (now_ms, now_ms);
                self.waiting = Some(Waiting { loader, came_ms, asked_ms, is_refused: false });
                let due = now_ms.saturating_add(ttl_ms).min(silent_long_ms);
                Err(Refusal::Waits { by, left: Duration::from_millis(due - now_ms) })
            }
        }
    }

    fn seat(&mut self, loader: &Loader, now_ms: u64) -> Arc<Loader> {
        let loader = Arc::new(loader.shown());
        self.current =
            Some(Current { loader: Arc::clone(&loader), seen_ms: now_ms, has_left: false, is_void: false });
        loader
    }

    fn take_over(&mut self, loader: &Loader, now_ms: u64) -> Admitted {
        let former = self.current.take();
        self.waiting = None;
        let by = self.seat(loader, now_ms);
        let Some(former) = former else { return Admitted::Goes };
        self.replaced.push_front((former.loader.id.clone(), by));
        self.replaced.truncate(REPLACED_MAX);
        Admitted::TookOver { from: former.loader }
    }

    fn view(&self, rank: u32, now_ms: u64) -> RankLoader {
        let current = self.current.as_ref();
        let is_waiting = |w: &&Waiting| !w.is_refused && now_ms < w.asked_ms + WAITING_GONE_MS;
        let waiting = self.waiting.as_ref().filter(is_waiting);
        RankLoader {
            rank,
            loader: current.map(|current| Loader::clone(&current.loader)),
            silent_ms: current.map(|current| now_ms.saturating_sub(current.seen_ms)),
            has_left: matches!(current, Some(current) if current.has_left),
            waiting: waiting.map(|waiting| Loader::clone(&waiting.loader)),
            unnamed_ms: self.unnamed_ms.map(|at| now_ms.saturating_sub(at)),
        }
    }
}

#[cfg(test)]
mod tests;
