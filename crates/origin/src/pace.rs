//! Paces the requests to one origin: by the configured rates, and by its `503` and `429` answers.
//!
//! ```text
//!       refusal, rate unknown                refusal: capacity is estimated
//!  OPEN ─────────────────────▶ PAUSE, SEEK ─────────────────────────────────▶ PAUSE, HOLD
//!   ▲ │  refusal after a second or more of traffic: its answers give the rate       │ ▲
//!   │ └─────────────────────────────────────────────────────────────────────▶ PAUSE, HOLD
//!   └── no caller waited for a minute ◀─────────────────────────────────────────────┘ │
//!                                        refusal: a slightly lower rate ──────────────┘
//! ```
//!
//! A refusal is a `503` or `429`.
//!
//! - OPEN: as fast as callers ask, or as configured.
//! - PAUSE: no caller sends a request before `Retry-After` is over. Without the header the pause is 50 to 150
//!   ms, doubled with each refusal that closely follows another. Refusals of requests that were in flight at
//!   the first refusal belong to the same event. They only prolong the pause.
//! - SEEK: the rate grows e-fold each quarter of a second until a refusal. A server with a token bucket lets
//!   a burst pass. The first refusal shows the size of that burst, so the refill rate of the bucket can be
//!   computed.
//! - HOLD: 2 % below that rate. It grows slowly: by 0.05 % a second where a pause costs a second, faster
//!   where it costs less, doubling every 20 s up to 5 %. It grows by 1.5 % a second while it is well below
//!   the rate that was refused last. Each refusal gives a new estimate and lowers the rate by 2 % to a half.
//!
//! In the long run about 3 % of the capacity is lost in pauses, and about as much stays unused.
//!
//! Invariants: 1. No request begins in a pause. 2. A slot is booked only if it is before the caller's
//! deadline, so that a caller that gives up delays no other. 3. Slots are at least 1/rate apart, after a
//! burst of 10 ms.

use crate::OriginError;
use fletch_bounds::{Gate, pass_gate};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// The burst that is allowed after a rest, as a time at the current rate.
const BURST: Duration = Duration::from_millis(10);
/// The length of one tick of the history, and of the whole history.
const TICK: Duration = Duration::from_millis(20);
const HISTORY: Duration = Duration::from_secs(60);
/// Traffic of this length is enough to measure a rate.
const MEASURABLE: Duration = Duration::from_secs(1);
/// The time in seconds in which the rate of SEEK grows e-fold.
const SEEK: f64 = 0.25;
/// Refusals closer together than this count as consecutive.
const CLOSE: Duration = Duration::from_secs(5);
/// The first pause without `Retry-After`. Doubled up to `PAUSE_MAX`.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// HOLD and SEEK end when no caller had to wait for this long.
const FORGET: Duration = Duration::from_secs(60);
/// The lowest rate, in requests a second.
const RATE_MIN: f64 = 1.0;
/// The lowest rate at which SEEK begins, so that a refusal after a few requests does not slow the next ones.
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
    /// When the phase began to send.
    since: Instant,
    /// When the rate of HOLD was computed last.
    stepped: Instant,
    /// No request begins before this time.
    paused_until: Option<Instant>,
    /// The number of refusal events so far.
    event: u64,
    /// Booked slots are void when this number changes.
    voided: u64,
    /// The number of consecutive refusals.
    close: u32,
    last_event: Option<Instant>,
    last_pause: Duration,
    /// The next free slot by the request rate.
    next: Instant,
    /// The next free slot by the byte rate.
    next_bytes: Instant,
    /// When a caller last had to wait for a slot.
    waited: Instant,
    /// The number of answered requests in each tick.
    answered: VecDeque<(Instant, u32)>,
    /// The estimated size of the origin's token bucket, in requests.
    burst: f64,
    /// The time from the first answer of that burst to the last.
    burst_span: Duration,
    /// When the first answer of that burst came.
    burst_began: Instant,
}

/// The pace of the requests to one origin.
#[derive(Debug)]
pub(crate) struct Pace {
    requests_per_s: Option<f64>,
    bytes_per_s: Option<f64>,
    state: Mutex<State>,
}

/// The permission to send one request. Remembers after which refusal event it was given.
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
        f(&mut self.state.lock(), Instant::now())
    }

    /// Waits for the slot of a request whose answer is expected to have `bytes` bytes.
    ///
    /// # Errors
    /// `Throttled`, at once, if the slot would come after `deadline`.
    pub async fn admit(&self, what: &str, bytes: u64, deadline: Instant) -> Result<Ticket, OriginError> {
        loop {
            let (at, event, voided) = self.with(|s, now| {
                let paced = self.requests_per_s.is_some() || s.phase(now) != Phase::Open;
                let at = s.slot(now, paced, self.bytes_per_s.is_some());
                if at > now && at >= deadline {
                    let paused = s.paused_until.and_then(|until| until.checked_duration_since(now));
                    return Err(OriginError::Throttled { what: what.to_owned(), retry_after: paused });
                }
                // The rate at the time of the slot: a slot that is booked in a pause comes after it.
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
            pass_gate(Gate::OriginPace, sleep_until(at)).await;
            // A pause that began meanwhile applies to waiting callers too.
            if self.with(|s, _| s.voided == voided) {
                return Ok(Ticket { event });
            }
        }
    }

    /// Records an answer that is not a refusal.
    pub fn answered(&self, ticket: Ticket) {
        self.with(|s, now| {
            if ticket.event == s.event {
                s.count(now);
            } else if ticket.event + 1 == s.event && matches!(s.phase, Phase::Seek { .. }) {
                // The origin let this request pass together with the first one that it refused.
                s.burst += 1.0;
                s.burst_span = now.saturating_duration_since(s.burst_began);
            }
        });
    }

    /// Charges `more` bytes to the byte rate: the answer was longer than expected.
    pub fn charge_more(&self, more: u64) {
        let Some(per_s) = self.bytes_per_s.filter(|_| more > 0) else { return };
        self.with(|s, now| {
            s.next_bytes = now.max(s.next_bytes) + Duration::from_secs_f64(more as f64 / per_s)
        });
    }

    /// Records a refusal (503 or 429). `jitter` is in 0..1. Returns whether the refusal began a pause.
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

    /// Returns the request rate at `now`, in requests a second.
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

    /// Returns the next free slot without booking it.
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
        // Spreads the callers of one origin, and its other clients, after the pause.
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
                if span >= MEASURABLE {
                    // The answers of the last second, including a burst.
                    let new =
                        |(tick, _): &&(Instant, u32)| now.saturating_duration_since(*tick) <= MEASURABLE;
                    let recent: u32 = self.answered.iter().filter(new).map(|(_, n)| n).sum();
                    let rate = f64::from(recent) / MEASURABLE.as_secs_f64();
                    Phase::Hold { rate: (0.9 * rate).max(RATE_MIN), refused: rate.max(RATE_MIN) }
                } else {
                    self.burst = f64::from(total);
                    self.burst_span = span;
                    self.burst_began = self.answered.front().map_or(now, |(t, _)| *t);
                    Phase::Seek { from: f64::from(total).max(SEEK_MIN) }
                }
            }
            Phase::Seek { .. } => self.hold(before, 0.0, now),
            // One refusal lowers the rate by 2 % to a half, however wrong the estimate is.
            Phase::Hold { rate, .. } => self.hold(rate, 0.5, now),
        };
        self.event += 1;
        self.last_event = Some(now);
        self.answered.clear();
        self.last_pause = pause;
        self.pause(until, spread);
        true
    }

    /// Begins a pause until `until`. Callers with a booked slot book again.
    fn pause(&mut self, until: Instant, spread: Duration) {
        self.voided += 1;
        self.paused_until = Some(until);
        self.next = until + spread;
        self.since = until;
        self.stepped = until;
        self.waited = until;
    }

    /// Returns the HOLD phase after a refusal at the rate `refused`.
    ///
    /// The new rate is at least `least * refused`.
    fn hold(&self, refused: f64, least: f64, now: Instant) -> Phase {
        // On a busy machine answers arrive in clumps, and the estimate may be far too low. The average rate
        // of answers in this phase is little more than the capacity.
        let seconds = now.saturating_duration_since(self.since).as_secs_f64().max(0.05);
        let total: u32 = self.answered.iter().map(|(_, n)| n).sum();
        let share = if seconds > 2.0 { 0.9 } else { 0.7 };
        let capacity = self.capacity(now).max(share * f64::from(total) / seconds.min(HISTORY.as_secs_f64()));
        let rate = (0.98 * capacity).clamp(least * refused, 0.98 * refused);
        Phase::Hold { rate: rate.max(RATE_MIN), refused: refused.min(1.1 * capacity).max(RATE_MIN) }
    }

    /// Returns the refill rate of the origin's token bucket.
    ///
    /// That is the rate at which a bucket of `burst` tokens, given the answers of this phase, is empty now.
    ///
    /// Assumes that the pause before this phase filled the bucket, in at most a second.
    fn capacity(&self, now: Instant) -> f64 {
        let left = |per_s: f64| {
            // The burst includes tokens that were refilled while it passed.
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
