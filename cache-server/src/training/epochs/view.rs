//! An epoch as the API shows it, and its receipt.

use super::{Epoch, Inner};
use crate::training::epochs::JobError;
use fletch_api::{
    Epoch as View, EpochReceipt, EpochState, OrderKind, WorldSpec, epochs::HELD_MAX,
    loaders::LOADERS_LISTED_MAX,
};
use fletch_core::{
    Hash,
    delivery::{
        certificate::{Certificate, Shuffle, chance},
        receipt::{Delivery, FORMAT_MAJOR, LtHash, Receipt},
    },
    plan::Bits,
};
use std::{
    borrow::Cow,
    future::Future,
    sync::{Arc, atomic::Ordering::Relaxed},
};
use tokio::task::spawn_blocking;

impl Epoch {
    /// Returns how many entries a rank may hold. At most once needs no acks, so nobody waits for them.
    pub(super) fn held_max(&self) -> u32 {
        if self.at_most_once() { u32::MAX } else { HELD_MAX }
    }

    /// Returns the delivered entries: the acknowledged ones, or with `at-most-once` the granted ones.
    pub(super) fn delivered<'a>(&self, inner: &'a Inner) -> Cow<'a, Bits> {
        let mut bits = Cow::Borrowed(inner.leases.acked());
        if self.at_most_once() {
            let (granted, n) = (inner.leases.live().flat_map(|l| &l.entries), bits.len());
            for e in granted.map(|&e| u64::from(e)).filter(|&e| e < n) {
                bits.to_mut().set(e);
            }
        }
        bits
    }

    /// Returns the epoch as the API shows it.
    #[must_use]
    pub fn view(&self) -> View {
        let inner = self.lock();
        let (l, world) = (&inner.leases, inner.leases.world());
        let planned = l.planned().count();
        let acked = if self.at_most_once() { planned - l.free().count() } else { l.acked().count() };
        View {
            epoch: self.number(),
            state: inner.state,
            world: WorldSpec { ranks: world.ranks, batch: world.batch, tail: world.tail },
            planned,
            acked,
            held: planned - acked - l.free().count(),
            leases: l.live().count() as u64,
            redelivered: l.redelivered(),
            commits: l.commits().collect(),
            padded: self.padded(&inner),
            ledger_bytes: self.ledger.len(),
            times: inner.times,
        }
    }

    /// Lets the next entries come from the cache, for a probe of `steps` steps. Returns after how many
    /// acknowledged entries the probe is over.
    ///
    /// # Errors
    /// [`JobError`], if the epoch is over or has too few cached samples left.
    pub fn probe(&self, steps: u64) -> Result<u64, JobError> {
        let mut inner = self.lock();
        self.is_open(&inner)?;
        let l = &inner.leases;
        let held = l.planned().count() - l.acked().count() - l.free().count();
        let n = steps.saturating_mul(u64::from(l.world().batch));
        inner.sequence.probe(n, held)
    }

    /// Returns how many entries each of the first `most` ranks has still to acknowledge.
    #[must_use]
    pub fn left_by_rank(&self, most: usize) -> Vec<u64> {
        self.lock().leases.left_by_rank().take(most).collect()
    }

    /// Returns whether a lease of the epoch lives.
    #[must_use]
    pub fn has_leases(&self) -> bool {
        let inner = self.lock();
        inner.state == EpochState::Open && inner.leases.live().next().is_some()
    }

    /// Returns whether the ledger has reached its limit, so that nothing more is granted.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.ledger.len() > self.setup.context.ledger_bytes
    }

    /// Checks whether the tenant's ledgers may grow. Acks are accepted even where they may not: what a lease
    /// holds bounds them.
    ///
    /// # Errors
    /// [`JobError::StateFull`].
    pub(super) fn check_state_bytes(&self) -> Result<(), JobError> {
        self.setup.check_state_bytes(1)
    }

    /// Returns the number of delivered pads: those that the leases added, and those of the order itself.
    fn padded(&self, inner: &Inner) -> u64 {
        let acked = inner.leases.acked();
        let known = acked.iter_in(self.setup.plan.entries().min(acked.len()), acked.len()).count();
        inner.padded.len() as u64 + known as u64
    }

    /// Returns whether the epoch is open.
    #[must_use]
    pub fn state_now(&self) -> EpochState {
        self.lock().state
    }

    /// Waits until everything that was answered before is durable.
    ///
    /// # Errors
    /// [`JobError::Io`], [`JobError::Reopening`].
    pub async fn durable(&self) -> Result<(), JobError> {
        self.ledger.durable(self.ledger.len()).await
    }

    /// Returns the receipt, once the epoch's end is durable. `contents` has the content hash of every sample.
    ///
    /// # Errors
    /// [`JobError::Open`], [`JobError::Closed`], those of `contents`, and [`JobError::Reopening`] after a
    /// rollback.
    pub async fn receipt<F>(self: &Arc<Self>, contents: impl FnOnce() -> F) -> Result<EpochReceipt, JobError>
    where
        F: Future<Output = Result<Arc<Vec<Hash>>, JobError>>,
    {
        {
            let inner = self.lock();
            self.is_open(&inner)?;
            if inner.state != EpochState::Finished {
                let left = inner.leases.planned().count() - inner.leases.acked().count();
                return Err(JobError::Open { epoch: self.number(), left });
            }
        }
        self.durable().await?;
        let made = self.receipt.get_or_try_init(|| async {
            let contents = contents().await?;
            let this = Arc::clone(self);
            spawn_blocking(move || this.make_receipt(&contents)).await.map_err(|_| JobError::TaskLost)?
        });
        Ok(made.await?.clone())
    }

    fn make_receipt(&self, contents: &[Hash]) -> Result<EpochReceipt, JobError> {
        let (acked, padded, pads, left_out, redelivered, certificate, acked_by) = {
            let inner = self.lock();
            if inner.state != EpochState::Finished {
                return Err(JobError::Reopening);
            }
            let left_out: Vec<u64> = inner.leases.left_out().collect();
            (
                inner.leases.acked().clone(),
                inner.padded.clone(),
                self.padded(&inner),
                left_out,
                inner.leases.redelivered(),
                self.certificate(&inner),
                inner.acked_by.values().flatten().take(LOADERS_LISTED_MAX).cloned().collect(),
            )
        };
        let samples = &self.setup.samples;
        let mut value = LtHash::default();
        let number = |e: u64| u32::try_from(e).unwrap_or(u32::MAX);
        for e in acked.iter_in(0, acked.len()).map(number).chain(padded.iter().copied()) {
            let item = self.schedule.item(e);
            let content = contents[item.sample as usize];
            let ordinal = samples.ordinals(item.sample).0;
            value.add(self.setup.root, &Delivery { ordinal, content, copy: item.copy });
        }
        let dropped = self.schedule.dropped().into_iter().chain(left_out.into_iter().map(number)).collect();
        let receipt = Receipt {
            format: "fletch.receipt".to_owned(),
            major: FORMAT_MAJOR,
            minor: 0,
            root: self.setup.root,
            plan: self.header.plan,
            seed: self.setup.seed,
            epoch: self.number(),
            delivered: acked.count() + padded.len() as u64,
            redelivered,
            dropped,
            padded: u32::try_from(pads).unwrap_or(u32::MAX),
            value,
            key_id: None,
            signature: None,
        };
        Ok(EpochReceipt { receipt, certificate, acked_by, unknown: self.unknown_ranks() })
    }

    /// Returns how well the entries granted so far are shuffled.
    fn certificate(&self, inner: &Inner) -> Certificate {
        let mut shuffle = Shuffle::default();
        inner.shuffles.iter().for_each(|s| shuffle.merge(s));
        let plan_units = &self.setup.plan_units;
        let per_unit = (0..plan_units.units()).map(|u| {
            let slots = plan_units.of_unit(u);
            u64::from(slots.end - slots.start)
        });
        shuffle.certificate(chance(per_unit))
    }

    /// Counts a finished epoch by its certificate, and logs a poor shuffle.
    pub(super) fn count_shuffle(&self, inner: &Inner) {
        let (counts, certificate) = (&self.setup.context.counts, self.certificate(inner));
        if certificate.poor {
            counts.poor.fetch_add(1, Relaxed);
            let Certificate { mates, near10, .. } = certificate;
            let why = match self.setup.order {
                OrderKind::Substitute => {
                    "too few units lay in the cache at once: give the dataset more of it, or pack it into \
                     more chunks"
                }
                OrderKind::Strict => "pack it into more chunks",
                OrderKind::Bucketed | OrderKind::Replay => "that is what its buckets or its ledger say",
            };
            tracing::warn!(
                job = %self.setup.job, epoch = self.number(), mates, near10, why,
                "the epoch was shuffled poorly: many neighbours come from one unit"
            );
        } else {
            counts.well.fetch_add(1, Relaxed);
        }
    }
}
