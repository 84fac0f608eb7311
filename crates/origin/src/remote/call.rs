//! One call to a store or server: its permits, its attempts, and what the answers tell the pace.

use super::translate::unavailable;
use super::{ALL_SETTING, Current, Remote, shared_permit, waited_in_vain};
use crate::OriginError;
use crate::backend::Backend;
use crate::pace::Ticket;
use crate::retry::retrying;
use crate::shared_permits::SharedPermit;
use crate::stalls::{Holding, SuspectSlot, WaitsFor};
use fletch_bounds::{Gate, pass_gate};
use parking_lot::Mutex;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};
use tracing::{Instrument as _, info_span};

/// The permits of one call.
struct CallPermits<'a> {
    /// The slot of a call to an object whose earlier call stalled.
    slot: Option<SuspectSlot>,
    _own: (Option<SemaphorePermit<'a>>, Option<SharedPermit<Backend>>),
    _holding: Holding,
}

impl Remote {
    /// Waits for a permit. `max` is the number of all permits, and `setting` what limits it.
    async fn permit<'a>(
        &self,
        what: &str,
        (gate, permits, max, setting): (Gate, &'a Semaphore, usize, &str),
        deadline: Instant,
    ) -> Result<SemaphorePermit<'a>, OriginError> {
        let begun = Instant::now();
        let waited = || waited_in_vain(what, &self.config.prefix, (begun, max), setting);
        let permit = pass_gate(gate, timeout_at(deadline, permits.acquire())).await;
        let permit = permit.map_err(|_| waited())?.map_err(|_| waited())?;
        // A permit that comes at the last moment is of no use.
        if Instant::now() < deadline { Ok(permit) } else { Err(waited()) }
    }

    /// Waits for the permits of a call: one of this origin, or one of its backend.
    ///
    /// A read of an object whose earlier read stalled first waits for one of the slots of such reads, so that
    /// it does not stand before other reads.
    async fn call_permits(
        &self,
        what: &str,
        is_suspect: bool,
        deadline: Instant,
    ) -> Result<CallPermits<'_>, OriginError> {
        let slot = match is_suspect {
            true => self.suspect_slot(what, deadline).await?,
            false => None,
        };
        let waits = WaitsFor::Backend(&self.line);
        let own = match &self.own_permits {
            Some(own) => {
                let max = self.config.concurrency.map_or(0, |n| n as usize);
                let own = (Gate::OriginRequests, own, max, "concurrency of its [[origin]]");
                let permit = self.permits.stalls.waited(waits, self.permit(what, own, deadline));
                (Some(permit.await?), None)
            }
            None => {
                let shared = (&self.permits.shared, &self.backend);
                let permit = shared_permit(what, &self.config.prefix, shared, deadline);
                (None, Some(self.permits.stalls.waited(waits, permit).await?))
            }
        };
        Ok(CallPermits { slot, _own: own, _holding: self.permits.stalls.holding(&self.line) })
    }

    async fn suspect_slot(&self, what: &str, deadline: Instant) -> Result<Option<SuspectSlot>, OriginError> {
        let (begun, origin) = (Instant::now(), &self.config.prefix);
        let permits = match self.config.concurrency {
            Some(n) => (n as usize).min(self.limits.requests_max),
            None => self.limits.requests_per_origin(),
        };
        let stalls = &self.permits.stalls;
        let slot = pass_gate(
            Gate::HungObjects,
            timeout_at(deadline, stalls.suspect_slot((&self.line, permits), what)),
        );
        let slot = tokio::select! {
            biased;
            slot = slot => slot,
            () = stalls.awaited_outside(&self.line) => {
                let what = what.to_owned();
                return Err(OriginError::GaveWay { what });
            }
        };
        match slot {
            Ok(slot) if Instant::now() < deadline => Ok(slot),
            _ => {
                let seconds = begun.elapsed().as_secs_f64();
                let why = format!(
                    "the call waited {seconds:.1} s for its turn at {origin}: an earlier call for this \
                     object brought no byte, and other calls for such objects hold the permits that they \
                     may hold"
                );
                Err(unavailable(what, &why))
            }
        }
    }

    /// Runs one call: waits for permits and for the pace, retries, and repeats once after new credentials.
    ///
    /// `bytes` is the expected length of the answer. Every request goes through this function or
    /// [`Remote::read`].
    pub(super) async fn retried<T, F: Future<Output = Result<T, OriginError>>>(
        &self,
        what: &str,
        bytes: u64,
        once: impl Fn(u32, Arc<Current>) -> F,
    ) -> Result<T, OriginError> {
        self.call(what, (bytes, false), once).await
    }

    /// Runs the read of one object as [`Remote::retried`] does. While other calls wait, a read that brings no
    /// byte may lose its permit: then it waits for another one, until its deadline.
    pub(super) async fn read<T, F: Future<Output = Result<T, OriginError>>>(
        &self,
        what: &str,
        bytes: u64,
        once: impl Fn(u32, Arc<Current>) -> F,
    ) -> Result<T, OriginError> {
        self.call(what, (bytes, true), once).await
    }

    async fn call<T, F: Future<Output = Result<T, OriginError>>>(
        &self,
        what: &str,
        (bytes, is_read): (u64, bool),
        once: impl Fn(u32, Arc<Current>) -> F,
    ) -> Result<T, OriginError> {
        let deadline = Instant::now() + self.limits.io_timeout;
        let (once, kept) = (&once, &Mutex::new(None::<CallPermits<'_>>));
        let keep = |permits| std::mem::replace(&mut *kept.lock(), permits);
        let keep = &keep;
        let span = info_span!("origin_call", origin = %self.config.prefix, object = what);
        retrying(what, deadline, self.limits.attempts_max, &self.counters, |attempt| async move {
            let is_suspect = is_read && self.permits.stalls.is_suspect(&self.line, what);
            let permits = match keep(None).filter(|permits| permits.slot.is_some() == is_suspect) {
                Some(permits) => permits,
                None => self.call_permits(what, is_suspect, deadline).await?,
            };
            let ticket = self.pace.admit(what, bytes, deadline).await?;
            let all = (Gate::AllRequests, &*self.permits.all, self.limits.requests_max, ALL_SETTING);
            let all = self.permits.stalls.waited(WaitsFor::Any, self.permit(what, all, deadline));
            let _permit = all.await?;
            self.check_expiry(what)?;
            let (result, is_revoked) = match is_read {
                true => {
                    let has_slot = permits.slot.is_some();
                    let sent = self.sent(attempt, once);
                    self.permits.stalls.attempt(&self.line, (what, has_slot), sent).await
                }
                false => (self.sent(attempt, once).await, false),
            };
            if is_revoked && self.permits.stalls.is_awaited_outside(&self.line) {
                return Err(OriginError::GaveWay { what: what.to_owned() });
            }
            if !is_revoked {
                keep(Some(permits));
            }
            self.paced(ticket, &result);
            result.map_err(|e| self.explained(e))
        })
        .instrument(span)
        .await
    }

    /// Sends the request of one attempt, and once more if the credentials changed after a rejection.
    async fn sent<T, F: Future<Output = Result<T, OriginError>>>(
        &self,
        attempt: u32,
        once: &impl Fn(u32, Arc<Current>) -> F,
    ) -> Result<T, OriginError> {
        let current = self.current();
        let used = current.generation;
        match pass_gate(Gate::Origin, once(attempt, current)).await {
            Err(e @ (OriginError::Denied { .. } | OriginError::Expired { .. }))
                if self.has_newer_credentials(used, &e) =>
            {
                self.counters.retries.fetch_add(1, Relaxed);
                pass_gate(Gate::Origin, once(attempt, self.current())).await
            }
            other => other,
        }
    }

    /// Tells the pace how the origin answered.
    fn paced<T>(&self, ticket: Ticket, result: &Result<T, OriginError>) {
        match result {
            Err(OriginError::Throttled { retry_after, .. }) => {
                if self.pace.refused(ticket, *retry_after, rand::random()) {
                    self.counters.pauses.fetch_add(1, Relaxed);
                    let origin = &self.config.prefix;
                    tracing::debug!(%origin, ?retry_after, "the origin asks clients to slow down");
                }
            }
            // No answer: it says nothing about the rate that the origin accepts.
            Err(OriginError::Unavailable { .. }) => {}
            _ => self.pace.answered(ticket),
        }
    }
}
