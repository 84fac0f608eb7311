//! How fast one origin is asked: the configured rates, and what its `503` and `429` teach.
//!
//! ```text
//!          refused, nothing known                 refused: capacity is estimated
//!  OPEN ───────────────────────────▶ PAUSE, SEEK ─────────────────────────────────▶ PAUSE, HOLD
//!   ▲ │    refused after a second or more of traffic: what was answered in it              │ ▲
//!   │ └──────────────────────────────────────────────────────────────────────────▶ PAUSE, HOLD
//!   └── nobody had to wait for a minute ◀──────────────────────────────────────────────────┘ │
//!                                            refused again: a little less ───────────────────┘
//! ```
//!
//! - OPEN: as fast as callers ask (or as is configured).
//! - PAUSE: nothing is sent to this origin before `Retry-After` is over, whoever asks; without the
//!   header 50 to 150 ms, doubled with each refusal that follows at once. What was under way when
//!   the first refusal came belongs to the same event and only prolongs the pause.
//! - SEEK: the rate grows e-fold each quarter of a second until it is refused. A server that counts
//!   with a bucket of tokens lets a burst pass; how large that is the first refusal has told (what
//!   it let pass at once), so the rate at which the bucket was refilled can be solved for.
//! - HOLD: 2 % below that. It grows slowly (0.05 % a second where a pause costs a second, faster
//!   where it costs less, doubling every 20 s up to 5 %), and by 1.5 % a second while it lies well
//!   below the rate that was refused last. Each refusal gives a new estimate, and takes 2 % to a
//!   half. In the long run some 3 % of the capacity go into pauses and as much is left unused.
//!
//! Invariants: 1. No request begins in a pause. 2. A slot is booked only if it lies before the
//! caller's deadline, so that callers who give up push nobody back. 3. Slots are at least 1/rate
//! apart, after a burst of 10 ms.

use crate::OriginError;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// What may be sent at once after a rest.
const BURST: Duration = Duration::from_millis(10);
/// Length of a bucket of the history, and of the history.
const TICK: Duration = Duration::from_millis(20);
const HISTORY: Duration = Duration::from_secs(60);
/// Traffic of this length tells a rate by itself.
const TELLING: Duration = Duration::from_secs(1);
/// SEEK grows e-fold in this time.
const SEEK: f64 = 0.25;
/// Refusals closer than this follow each other.
const CLOSE: Duration = Duration::from_secs(5);
/// The first pause where the origin names none; doubled up to `PAUSE_MAX`.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// HOLD and SEEK end when nobody had to wait for so long.
const FORGET: Duration = Duration::from_secs(60);
/// No rate is below this, per second.
const RATE_MIN: f64 = 1.0;
/// SEEK begins at this rate at least: a refusal after a few requests must not slow the next.
const SEEK_MIN: f64 = 10.0;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    Open,
    Seek {
        from: f64,
    },
    Hold {
        rate: f64,
        /// The rate that was refused last.
        refused: f64,
    },
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// When the phase began to send; the rate of HOLD is that of `stepped`.
    since: Instant,
    stepped: Instant,
    /// Nothing begins before.
    paused_until: Option<Instant>,
    /// Counts events; the slots that are booked are void when `voided` moves.
    event: u64,
    voided: u64,
    /// How many refusals followed each other closely, and when the last event was.
    close: u32,
    last_event: Option<Instant>,
    last_pause: Duration,
    /// The next free slot, of requests and of bytes.
    next: Instant,
    next_bytes: Instant,
    /// When somebody last had to wait for a slot.
    waited: Instant,
    /// Requests answered, by tick.
    answered: VecDeque<(Instant, u32)>,
    /// What the origin seems to let pass at once.
    burst: f64,
    /// From the first answer of that burst to the last, and when the first came.
    burst_span: Duration,
    burst_began: Instant,
}

/// The pace of one origin.
#[derive(Debug)]
pub(crate) struct Pace {
    requests_per_s: Option<f64>,
    bytes_per_s: Option<f64>,
    state: Mutex<State>,
}

/// The right to send one request, given before a certain pause.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ticket {
    event: u64,
}

impl Pace {
    pub fn new(requests_per_s: Option<u32>, bytes_per_s: Option<u64>, now: Instant) -> Self {
        let state = State {
            phase: Phase::Open,
            since: now,
            stepped: now,
            paused_until: None,
            event: 0,
            voided: 0,
            close: 0,
            last_event: None,
            last_pause: Duration::ZERO,
            next: now,
            next_bytes: now,
            waited: now,
            answered: VecDeque::new(),
            burst: 0.0,
            burst_span: Duration::ZERO,
            burst_began: now,
        };
        Pace {
            requests_per_s: requests_per_s.map(f64::from),
            bytes_per_s: bytes_per_s.map(|n| n.max(1) as f64),
            state: Mutex::new(state),
        }
    }

    fn with<T>(&self, f: impl FnOnce(&mut State, Instant) -> T) -> T {
        f(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner), Instant::now())
    }

    /// Waits for the turn of a request that is expected to bring so many bytes.
    ///
    /// # Errors
    /// `Throttled` at once where the turn would come after `deadline`.
    pub async fn admit(&self, what: &str, bytes: u64, deadline: Instant) -> Result<Ticket, OriginError> {
        loop {
            let (at, event, voided) = self.with(|s, now| {
                let paced = self.requests_per_s.is_some() || s.phase(now) != Phase::Open;
                let at = s.slot(now, paced, self.bytes_per_s.is_some());
                if at > now && at >= deadline {
                    let paused = s.paused_until.and_then(|until| until.checked_duration_since(now));
                    return Err(OriginError::Throttled { what: what.to_owned(), retry_after: paused });
                }
                // That of the slot's own time: what is booked in a pause is for after it.
                let rate = s.rate(at).min(self.requests_per_s.unwrap_or(f64::INFINITY));
                if paced {
                    s.next = at + Duration::from_secs_f64(1.0 / rate);
                }
                if let Some(per_s) = self.bytes_per_s {
                    s.next_bytes = at.max(s.next_bytes) + Duration::from_secs_f64(bytes as f64 / per_s);
                }
                if at > now {
                    s.waited = now;
                }
                Ok((at, s.event, s.voided))
            })?;
            sleep_until(at).await;
            // A pause that came meanwhile holds for those who were waiting too.
            if self.with(|s, _| s.voided == voided) {
                return Ok(Ticket { event });
            }
        }
    }

    /// A request was answered, with whatever but a refusal.
    pub fn answered(&self, ticket: Ticket) {
        self.with(|s, now| {
            if ticket.event == s.event {
                s.count(now);
            } else if ticket.event + 1 == s.event && matches!(s.phase, Phase::Seek { .. }) {
                // Let pass together with what was refused first.
                s.burst += 1.0;
                s.burst_span = now.saturating_duration_since(s.burst_began);
            }
        });
    }

    /// More bytes came than were expected.
    pub fn brought(&self, more: u64) {
        let Some(per_s) = self.bytes_per_s.filter(|_| more > 0) else { return };
        self.with(|s, now| {
            s.next_bytes = now.max(s.next_bytes) + Duration::from_secs_f64(more as f64 / per_s)
        });
    }

    /// A request was answered with 503 or 429. `jitter` is in 0..1. True if it began a pause.
    pub fn refused(&self, ticket: Ticket, retry_after: Option<Duration>, jitter: f64) -> bool {
        self.with(|s, now| s.refused(ticket, retry_after, jitter, now))
    }
}

impl State {
    fn phase(&mut self, now: Instant) -> Phase {
        if self.phase != Phase::Open && now.saturating_duration_since(self.waited) > FORGET {
            self.phase = Phase::Open;
        }
        self.phase
    }

    /// Requests a second, then.
    fn rate(&mut self, now: Instant) -> f64 {
        let seconds = |since| now.saturating_duration_since(since).as_secs_f64();
        match &mut self.phase {
            Phase::Open => f64::INFINITY,
            Phase::Seek { from } => (*from * (seconds(self.since) / SEEK).min(40.0).exp()).min(1e9),
            Phase::Hold { rate, refused } => {
                let fast = if *rate < 0.9 * *refused { 0.015 } else { 0.0 };
                let first = (0.0005 / self.last_pause.as_secs_f64().max(0.1)).min(0.005);
                let slow = (first * (seconds(self.since) / 20.0).exp2()).min(0.05);
                let dt = seconds(self.stepped);
                if dt > 0.1 {
                    *rate *= 1.0 + slow.max(fast) * dt.min(1.0);
                    self.stepped = now;
                }
                *rate
            }
        }
    }

    /// The next free slot, not booked.
    fn slot(&self, now: Instant, paced: bool, bytes: bool) -> Instant {
        let rested = now.checked_sub(BURST).unwrap_or(now);
        let mut at = if paced { self.next.max(rested) } else { rested };
        if bytes {
            at = at.max(self.next_bytes);
        }
        at.max(self.paused_until.unwrap_or(at)).max(now)
    }

    fn count(&mut self, now: Instant) {
        match self.answered.back_mut() {
            Some((tick, n)) if now.saturating_duration_since(*tick) < TICK => *n += 1,
            _ => self.answered.push_back((now, 1)),
        }
        while self.answered.front().is_some_and(|(tick, _)| now.saturating_duration_since(*tick) > HISTORY) {
            self.answered.pop_front();
        }
    }

    fn refused(&mut self, ticket: Ticket, asked: Option<Duration>, jitter: f64, now: Instant) -> bool {
        let pause = asked.filter(|asked| !asked.is_zero()).unwrap_or_else(|| {
            let doubled = PAUSE.saturating_mul(1 << self.close.min(6)).min(PAUSE_MAX);
            doubled.mul_f64(0.5 + jitter.clamp(0.0, 1.0))
        });
        let until = now + pause;
        // Callers of one origin, and other clients of it, should not come back in one instant.
        let spread = (pause / 10).min(Duration::from_millis(100)).mul_f64(jitter.clamp(0.0, 1.0));
        let same = ticket.event != self.event;
        if same {
            if self.paused_until.is_some_and(|before| before < until) {
                self.pause(until, spread);
            }
            return false;
        }
        let before = self.rate(now);
        let recent = self.last_event.is_some_and(|at| now.saturating_duration_since(at) < CLOSE + pause);
        self.close = if recent { self.close + 1 } else { 0 };
        self.phase = match self.phase {
            Phase::Open => {
                let total: u32 = self.answered.iter().map(|(_, n)| n).sum();
                let span = self.answered.front().map_or(Duration::ZERO, |(t, _)| now.duration_since(*t));
                if span >= TELLING {
                    // What it answered in the last second, a burst included.
                    let new = |(tick, _): &&(Instant, u32)| now.saturating_duration_since(*tick) <= TELLING;
                    let recent: u32 = self.answered.iter().filter(new).map(|(_, n)| n).sum();
                    let rate = f64::from(recent) / TELLING.as_secs_f64();
                    Phase::Hold { rate: (0.9 * rate).max(RATE_MIN), refused: rate.max(RATE_MIN) }
                } else {
                    self.burst = f64::from(total);
                    self.burst_span = span;
                    self.burst_began = self.answered.front().map_or(now, |(t, _)| *t);
                    Phase::Seek { from: f64::from(total).max(SEEK_MIN) }
                }
            }
            Phase::Seek { .. } => self.hold(before, 0.0, now),
            // However wrong the estimate is, one refusal takes 2 % to a half.
            Phase::Hold { rate, .. } => self.hold(rate, 0.5, now),
        };
        self.event += 1;
        self.last_event = Some(now);
        self.answered.clear();
        self.last_pause = pause;
        self.pause(until, spread);
        true
    }

    /// Nothing begins before `until`; what is booked is booked again.
    fn pause(&mut self, until: Instant, spread: Duration) {
        self.voided += 1;
        self.paused_until = Some(until);
        self.next = until + spread;
        self.since = until;
        self.stepped = until;
        self.waited = until;
    }

    /// HOLD, after `refused` requests a second were; at least `least` of that.
    fn hold(&self, refused: f64, least: f64, now: Instant) -> Phase {
        // On a busy machine answers come in clumps and the estimate may be far too low; what was
        // answered on the average of this phase is little more than the capacity.
        let seconds = now.saturating_duration_since(self.since).as_secs_f64().max(0.05);
        let total: u32 = self.answered.iter().map(|(_, n)| n).sum();
        let share = if seconds > 2.0 { 0.9 } else { 0.7 };
        let capacity = self.capacity(now).max(share * f64::from(total) / seconds.min(HISTORY.as_secs_f64()));
        let rate = (0.98 * capacity).clamp(least * refused, 0.98 * refused);
        Phase::Hold { rate: rate.max(RATE_MIN), refused: refused.min(1.1 * capacity).max(RATE_MIN) }
    }

    /// The rate at which a bucket of `burst` tokens, filled in the pause before this phase (in a
    /// second, say), was empty just now, given what it let pass.
    fn capacity(&self, now: Instant) -> f64 {
        let left = |per_s: f64| {
            // What was refilled while the first burst passed was none of it.
            let burst = (self.burst - per_s * self.burst_span.as_secs_f64()).max(0.0);
            let filled = self.last_pause.as_secs_f64().min(1.0);
            let (mut level, mut at) = (filled * burst, self.since);
            for (tick, n) in &self.answered {
                let end = (*tick + TICK).min(now);
                level += per_s * end.saturating_duration_since(at).as_secs_f64() - f64::from(*n);
                level = level.min(burst);
                at = end;
            }
            level
        };
        let (mut low, mut high) = (0.0, 1e6);
        for _ in 0..60 {
            let middle = (low + high) / 2.0;
            if left(middle) < 0.0 { low = middle } else { high = middle }
        }
        high
    }
}

#[cfg(test)]
mod tests;
