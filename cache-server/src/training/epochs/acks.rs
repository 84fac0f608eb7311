//! Acks: which granted entries were consumed, and which leases their ranks still hold or release.
//!
//! [`Epoch::acks`] answers after the ledger has the acks on disk.

use super::{Epoch, Inner};
use crate::training::{benefit::AckedLease, epochs::JobError};
use fletch_api::{
    AckedBy, EpochState, Loader,
    epochs::{ACKS_MAX, Ack, Acked, Acks},
};
use fletch_core::delivery::{Event, lease::LeaseError};
use std::{collections::BTreeSet, sync::atomic::Ordering::Relaxed};

/// What a request says about leases that its rank got before.
#[derive(Clone, Copy, Default)]
pub(super) struct Reported<'a> {
    /// The consumed entries. The server applies them first.
    pub acks: &'a [Ack],
    /// Leases that the rank will not consume further.
    pub release: &'a [u64],
    /// Leases that the rank still holds.
    pub renew: &'a [u64],
}

/// The most loaders of a rank whose acks are counted apart.
const LOADERS_OF_RANK_MAX: usize = 8;

impl Inner {
    /// Counts acknowledged entries to their loader.
    fn note_acked_by(&mut self, rank: u32, loader: Option<&Loader>, entries: u64) {
        let rows = self.acked_by.entry(rank).or_default();
        let id = |loader: Option<&Loader>| loader.map(|l| l.id.clone());
        let is_known = rows.iter().any(|row| id(row.loader.as_ref()) == id(loader));
        let named = rows.iter().filter(|row| row.loader.is_some()).count();
        let loader = if is_known || named < LOADERS_OF_RANK_MAX { loader } else { None };
        match rows.iter_mut().find(|row| id(row.loader.as_ref()) == id(loader)) {
            Some(row) => row.entries += entries,
            None => rows.push(AckedBy { rank, loader: loader.map(Loader::shown), entries }),
        }
    }
}

impl Epoch {
    /// Applies acks, releases and renewals, all or none of them. Returns when they are durable.
    ///
    /// # Errors
    /// [`JobError`].
    pub async fn acks(&self, ask: &Acks) -> Result<Acked, JobError> {
        let (mut answer, upto) = self.acks_now(ask)?;
        self.ledger.durable(upto).await?;
        answer.ttl_ms = self.setup.ttl_ms();
        Ok(answer)
    }

    fn acks_now(&self, ask: &Acks) -> Result<(Acked, u64), JobError> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        self.is_open(inner)?;
        let mut events = self.expire_due(inner);
        let reported = Reported { acks: &ask.acks, release: &ask.release, renew: &ask.renew };
        if let Err(e) = self.check(inner, ask.rank, reported) {
            self.ledger.append(&events);
            return Err(e);
        }
        let entries = self.apply(inner, (ask.rank, ask.loader.as_ref()), &ask.acks, &mut events)?;
        self.release(inner, ask.rank, &ask.release, &mut events)?;
        let gone = self.renew(inner, ask.rank, &ask.renew);
        let finished = inner.state == EpochState::Finished;
        Ok((Acked { entries, gone, ttl_ms: 0, finished }, self.ledger.append(&events)))
    }

    /// Checks whether all acks, releases and renewals can be applied.
    pub(super) fn check(&self, inner: &Inner, rank: u32, reported: Reported) -> Result<(), JobError> {
        let Reported { acks, release, renew } = reported;
        let ranks = inner.leases.world().ranks;
        if rank >= ranks {
            return Err(LeaseError::Rank { rank, ranks }.into());
        }
        if acks.len().max(release.len()).max(renew.len()) > ACKS_MAX {
            let why = format!("more than {ACKS_MAX} acks, releases or renewals in one request");
            return Err(JobError::TooLarge(why));
        }
        for a in acks {
            let (owner, entries) = match (inner.leases.lease(a.lease), inner.acked_leases.get(&a.lease)) {
                (Some(l), _) => (l.request.rank, u32::try_from(l.entries.len()).unwrap_or(u32::MAX)),
                (None, Some(&settled)) => settled,
                (None, None) => {
                    self.setup.context.counts.late_acks.fetch_add(1, Relaxed);
                    return Err(LeaseError::Gone(a.lease).into());
                }
            };
            if owner != rank {
                return Err(LeaseError::Foreign { lease: a.lease, owner, rank }.into());
            }
            if a.upto > entries {
                return Err(LeaseError::Beyond { lease: a.lease, entries, upto: a.upto }.into());
            }
        }
        for &lease in release {
            let owner = match (inner.leases.lease(lease), inner.acked_leases.get(&lease)) {
                (Some(l), _) => l.request.rank,
                (None, Some(&(owner, _))) => owner,
                // A lease that is gone needs no release.
                (None, None) => continue,
            };
            if owner != rank {
                return Err(LeaseError::Foreign { lease, owner, rank }.into());
            }
        }
        Ok(())
    }

    /// Applies acks that were checked; returns the number of entries that became acknowledged.
    pub(super) fn apply(
        &self,
        inner: &mut Inner,
        (rank, loader): (u32, Option<&Loader>),
        acks: &[Ack],
        events: &mut Vec<Event>,
    ) -> Result<u64, JobError> {
        let (mut entries, expires) = (0, self.expires_ms());
        for a in acks {
            let t = &mut inner.times;
            for b in &a.batches {
                t.batches += 1;
                t.waited_ns = t.waited_ns.saturating_add(b.waited_ns);
                t.prepared_ns = t.prepared_ns.saturating_add(b.prepared_ns);
                t.stepped_ns = t.stepped_ns.saturating_add(b.stepped_ns);
            }
            let Some(l) = inner.leases.lease(a.lease) else { continue };
            let len = u32::try_from(l.entries.len()).unwrap_or(u32::MAX);
            let of = AckedLease { epoch: self.number(), lease: a.lease, rank, worker: l.request.worker };
            let newly = l.entries.get(l.acked as usize..a.upto as usize).unwrap_or_default().to_vec();
            let Some(event) = inner.leases.ack(rank, a.lease, a.upto)? else { continue };
            self.setup.window.note_batches(of, &a.batches);
            entries += newly.len() as u64;
            inner.record_acked(&newly);
            events.push(event);
            if inner.leases.lease(a.lease).is_none() {
                inner.record_acked_lease(a.lease, rank, len);
            } else {
                inner.leases.renew_one(rank, a.lease, expires);
            }
        }
        if entries > 0 {
            inner.note_acked_by(rank, loader, entries);
            self.setup.context.counts.acked.fetch_add(entries, Relaxed);
            self.changed.notify_waiters();
            self.end_if_over(inner, events);
        }
        Ok(entries)
    }

    /// Ends leases that their rank will not consume further, as if they had expired. They were checked.
    pub(super) fn release(
        &self,
        inner: &mut Inner,
        rank: u32,
        release: &[u64],
        events: &mut Vec<Event>,
    ) -> Result<(), JobError> {
        if self.at_most_once() {
            let ended: BTreeSet<u64> = release.iter().copied().collect();
            self.deliver(inner, |l| ended.contains(&l.id), events);
            return Ok(());
        }
        let (mut back, begun) = (Vec::new(), events.len());
        for &lease in release {
            let Some((event, entries)) = inner.leases.release(rank, lease)? else { continue };
            events.push(event);
            inner.lease_ended(lease, rank);
            back.extend(entries);
        }
        if events.len() > begun {
            tracing::debug!(
                job = %self.setup.job, epoch = self.number(), rank, leases = events.len() - begun,
                entries = back.len(), "leases were released; what they held is granted again"
            );
            self.setup.context.counts.released.fetch_add(back.len() as u64, Relaxed);
            inner.sequence.take_back(&back);
            self.changed.notify_waiters();
        }
        Ok(())
    }

    pub(super) fn renew(&self, inner: &mut Inner, rank: u32, renew: &[u64]) -> Vec<u64> {
        let expires = self.expires_ms();
        let gone = renew
            .iter()
            .copied()
            .filter(|&l| !inner.leases.renew_one(rank, l, expires) && !inner.acked_leases.contains_key(&l));
        gone.collect()
    }
}
