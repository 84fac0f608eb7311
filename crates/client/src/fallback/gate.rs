//! Whether the server is there, as far as this process knows.
//!
//! ```text
//! here ──lost──▶ away(since) ──back──▶ here
//! ```
//! Made without a server it is away for ever.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

pub(super) struct Gate(Mutex<State>);

struct State {
    away: bool,
    /// When it was lost; `None` for a gate that never had a server.
    since: Option<Instant>,
    losses: u64,
}

impl Gate {
    pub fn new(away: bool) -> Self {
        Gate(Mutex::new(State { away, since: None, losses: 0 }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn is_away(&self) -> bool {
        self.state().away
    }

    pub fn losses(&self) -> u64 {
        self.state().losses
    }

    /// Notes a loss; says whether it is news.
    pub fn lost(&self, now: Instant) -> bool {
        let mut s = self.state();
        if s.away {
            return false;
        }
        *s = State { away: true, since: Some(now), losses: s.losses + 1 };
        true
    }

    /// Notes that the server answers; says for how long it was away, if it was.
    pub fn back(&self, now: Instant) -> Option<Duration> {
        let mut s = self.state();
        if !std::mem::replace(&mut s.away, false) {
            return None;
        }
        s.since.take().map(|since| now - since)
    }

    /// Whether it was lost less than `span` ago.
    pub fn lost_within(&self, now: Instant, span: Duration) -> bool {
        self.state().since.is_some_and(|since| now - since < span)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_news_once_and_ends_once() {
        let (gate, t) = (Gate::new(false), Instant::now());
        let ms = Duration::from_millis;
        assert!(!gate.is_away() && gate.back(t).is_none());
        assert!(gate.lost(t) && !gate.lost(t + ms(5)));
        assert!(
            gate.is_away() && gate.lost_within(t + ms(9), ms(10)) && !gate.lost_within(t + ms(10), ms(10))
        );
        assert_eq!(gate.back(t + ms(70)), Some(ms(70)));
        assert!(!gate.is_away() && gate.back(t).is_none() && !gate.lost_within(t, ms(10)));
        assert!(gate.lost(t));
        assert_eq!(gate.losses(), 2);
        let never = Gate::new(true);
        assert!(never.is_away() && !never.lost(t) && !never.lost_within(t, ms(10)));
    }
}
