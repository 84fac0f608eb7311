//! Remembers whether the server answers, as far as this process knows.
//!
//! ```text
//! up ──mark_lost──▶ away(since) ──mark_back──▶ up
//! ```
//! Without a server the state is away for ever.

use parking_lot::{Mutex, MutexGuard};
use std::time::Duration;
use tokio::time::Instant;

/// Whether the server answers, since when not, and how often it was lost.
pub(super) struct ServerState(Mutex<State>);

struct State {
    away: bool,
    /// When the server was lost. `None` without a server.
    since: Option<Instant>,
    losses: u64,
}

impl ServerState {
    pub fn new(away: bool) -> Self {
        ServerState(Mutex::new(State { away, since: None, losses: 0 }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    pub fn is_away(&self) -> bool {
        self.state().away
    }

    pub fn losses(&self) -> u64 {
        self.state().losses
    }

    /// Records that the server was lost. Returns whether it was up before.
    pub fn mark_lost(&self, now: Instant) -> bool {
        let mut s = self.state();
        if s.away {
            return false;
        }
        *s = State { away: true, since: Some(now), losses: s.losses + 1 };
        true
    }

    /// Records that the server answers. Returns how long it was away, if it was.
    pub fn mark_back(&self, now: Instant) -> Option<Duration> {
        let mut s = self.state();
        if !std::mem::replace(&mut s.away, false) {
            return None;
        }
        s.since.take().map(|since| now - since)
    }

    /// Returns whether the server was lost less than `span` ago.
    pub fn lost_within(&self, now: Instant, span: Duration) -> bool {
        self.state().since.is_some_and(|since| now - since < span)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_reported_once_and_ends_once() {
        let (server, t) = (ServerState::new(false), Instant::now());
        let ms = Duration::from_millis;
        assert!(!server.is_away() && server.mark_back(t).is_none());
        assert!(server.mark_lost(t) && !server.mark_lost(t + ms(5)));
        assert!(
            server.is_away()
                && server.lost_within(t + ms(9), ms(10))
                && !server.lost_within(t + ms(10), ms(10))
        );
        assert_eq!(server.mark_back(t + ms(70)), Some(ms(70)));
        assert!(!server.is_away() && server.mark_back(t).is_none() && !server.lost_within(t, ms(10)));
        assert!(server.mark_lost(t));
        assert_eq!(server.losses(), 2);
        let never = ServerState::new(true);
        assert!(never.is_away() && !never.mark_lost(t) && !never.lost_within(t, ms(10)));
    }
}
