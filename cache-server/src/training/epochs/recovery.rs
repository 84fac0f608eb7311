//! Opening an epoch from its ledger: a new epoch, one from before a restart, or one that continues from a
//! state.

use super::{
    Epoch, Inner, JobSetup, Schedule,
    sequence::{Sequence, SweepSubscription},
};
use crate::training::epochs::{JobError, ledger::LedgerFile};
use fletch_api::{EpochState, Times};
use fletch_core::{
    Hash,
    delivery::{
        Event, Leases,
        ledger::{self, BadLedger, Header, Ledger},
        reclaim::RECLAIMED,
    },
    plan::{Bits, World},
};
use fletch_host::replace::replace_file;
use parking_lot::Mutex;
use std::sync::OnceLock;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};
use tokio::sync::{Notify, OnceCell};

impl Epoch {
    /// Returns the header of a new epoch's ledger.
    #[must_use]
    pub fn header(setup: &JobSetup, epoch: u64, world: World) -> Header {
        Header {
            job: setup.job.clone(),
            epoch,
            root: setup.root,
            layout: setup.layout,
            plan: setup.hash,
            order: setup.order.as_str().to_owned(),
            seed: setup.seed,
            world,
        }
    }

    /// Returns the first bytes of the ledger of an epoch of which nothing was delivered.
    #[must_use]
    pub fn head(setup: &JobSetup, epoch: u64, world: World) -> Vec<u8> {
        ledger::state(&Epoch::header(setup, epoch, world), &Bits::zeros(0))
    }

    /// Begins an epoch in a file of its own, which replaces what was there. Durable when this returns.
    /// Blocking.
    ///
    /// `header` has the world in which the epoch was planned; `acked` is what was delivered before.
    ///
    /// # Errors
    /// [`JobError::Io`].
    pub fn begin(path: &Path, header: &Header, acked: &Bits) -> Result<(), JobError> {
        let failed = |error| JobError::Io { path: path.to_owned(), error };
        replace_file(path, &ledger::state(header, acked)).map_err(failed)
    }

    /// Opens an epoch from its ledger and continues it in a world. Blocking.
    ///
    /// # Errors
    /// [`JobError`]: the file cannot be read, is damaged, or of something else.
    pub fn open(
        setup: &Arc<JobSetup>,
        path: &Path,
        epoch: u64,
        world: World,
        over: bool,
    ) -> Result<Arc<Self>, JobError> {
        let failed = |error| JobError::Io { path: path.to_owned(), error };
        let bad = |why| JobError::Damaged { path: path.to_owned(), why };
        let bytes = std::fs::read(path).map_err(failed)?;
        let read = Ledger::read(&bytes).map_err(bad)?;
        read.header.world.check()?;
        let expected = Epoch::header(setup, epoch, read.header.world);
        if let Some((what, got, want)) = header_mismatch(&read.header, &expected, setup.block > 0) {
            return Err(JobError::StateDiffers { what, got, want });
        }
        let schedule = Schedule::new(setup, epoch, read.header.world)?;
        let leases = Leases::new(schedule.planned(), read.header.world)?;
        let mut inner = Inner {
            sequence: Sequence::Over,
            leases,
            state: EpochState::Open,
            shuffles: Vec::new(),
            padded: BTreeSet::new(),
            times: Times::default(),
            acked_by: BTreeMap::new(),
            acked_leases: BTreeMap::new(),
            classes: BTreeMap::new(),
            commits: BTreeMap::new(),
            losses: Vec::new(),
            reopening: false,
            prefetcher: None,
        };
        let expires = setup.now_ms().saturating_add(setup.ttl_ms());
        let began = inner.replay(setup, &schedule, &read, expires).map_err(bad)?;
        // A grant from before a `PUT` of a state, of a deleted job of the same name, or one that a crash took
        // before it was durable, has a lower lease number.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        inner.leases.number_after(u64::try_from(now.as_micros()).unwrap_or(0));
        schedule.share(&mut inner.leases)?;
        if inner.leases.finished() {
            inner.state = EpochState::Finished;
        }
        let charge = setup.charges.ledger(epoch);
        let file = LedgerFile::open(path, read.len as u64, charge).map_err(failed)?;
        if over && inner.state == EpochState::Open {
            inner.state = EpochState::Abandoned;
        }
        inner.sequence = match &setup.sweep {
            Some(sweep) if inner.state == EpochState::Open => Sequence::Substitute(Box::new(
                SweepSubscription::join(setup, sweep, &inner.leases, &read, &setup.key(epoch)),
            )),
            _ => Sequence::of(&schedule, &began)?,
        };
        let id = Hash::of(format!("{}\0{epoch}", path.display()).as_bytes());
        let mut owner = [0; 8];
        owner.copy_from_slice(&id.as_bytes()[..8]);
        let this = Arc::new(Epoch {
            setup: Arc::clone(setup),
            header: read.header,
            schedule,
            owner: u64::from_le_bytes(owner),
            ledger: file,
            inner: Mutex::new(inner),
            changed: Notify::new(),
            costs: OnceLock::new(),
            receipt: OnceCell::new(),
        });
        {
            let mut inner = this.lock();
            if inner.state == EpochState::Open && inner.leases.world() != world {
                let mut events = Vec::new();
                let changed = this.change_world(&mut inner, world, &mut events);
                if changed.is_ok() {
                    this.end_if_over(&mut inner, &mut events);
                }
                this.ledger.append(&events);
                match changed {
                    // The epoch stays in its world until another request asks for the change.
                    Err(e @ JobError::MidStep { .. }) => {
                        tracing::warn!(
                            job = %setup.job, epoch, error = %e,
                            "an epoch goes on in the world of its ledger"
                        );
                    }
                    changed => changed?,
                }
            }
        }
        Ok(this)
    }

    /// Returns the epoch's state: a ledger that contains only what was delivered.
    #[must_use]
    pub fn state(&self) -> Vec<u8> {
        let inner = self.lock();
        let mut header = self.header.clone();
        if matches!(self.schedule, Schedule::Buckets(_)) {
            // Batch and tail are those of its beginning; in the middle of a step it needs the same number of
            // ranks.
            header.world = inner.leases.world();
        }
        ledger::state(&header, &self.delivered(&inner))
    }

    /// Returns whether exactly `acked` was delivered.
    #[must_use]
    pub fn is_at(&self, acked: &Bits) -> bool {
        *self.delivered(&self.lock()) == *acked
    }
}

/// Returns the first field in which a ledger's header differs from the expected one.
pub fn header_mismatch(
    got: &Header,
    want: &Header,
    by_units: bool,
) -> Option<(&'static str, String, String)> {
    let pairs = [
        ("root", got.root.to_string(), want.root.to_string()),
        ("plan", got.plan.to_string(), want.plan.to_string()),
        ("order", got.order.clone(), want.order.clone()),
        ("seed", got.seed.to_string(), want.seed.to_string()),
        ("epoch", got.epoch.to_string(), want.epoch.to_string()),
    ];
    // A strict order by units depends on the layout.
    let layout = by_units.then(|| ("layout", got.layout.to_string(), want.layout.to_string()));
    pairs.into_iter().chain(layout).find(|(_, a, b)| a != b)
}

impl Inner {
    /// Applies a ledger's events to fresh leases; returns the leases as they were when the last world began.
    fn replay(
        &mut self,
        setup: &JobSetup,
        schedule: &Schedule,
        read: &Ledger,
        expires: u64,
    ) -> Result<Leases, BadLedger> {
        self.add_ranks();
        let mut began = self.leases.clone();
        for (i, event) in read.events.iter().enumerate() {
            let acking = if let Event::Ack { lease, upto } = event {
                self.leases.lease(*lease).map(|l| {
                    let newly = l.entries.get(l.acked as usize..*upto as usize).unwrap_or_default().to_vec();
                    (*lease, l.request.rank, u32::try_from(l.entries.len()).unwrap_or(u32::MAX), newly)
                })
            } else {
                None
            };
            let wrong = |why| BadLedger::Contradiction { at: i + 1, why };
            self.leases.apply(event, expires).map_err(wrong)?;
            match event {
                // Of entries that were granted before the epoch was restored the order is lost.
                Event::Grant { request, .. } if request.worker == RECLAIMED => {}
                Event::Grant { request, entries, .. } => {
                    for &e in entries {
                        let unit = setup.samples.unit(schedule.item(e).sample);
                        self.shuffles[request.rank as usize].see(unit);
                    }
                }
                Event::Ack { .. } => {
                    if let Some((lease, rank, len, newly)) = acking {
                        self.record_acked(&newly);
                        if self.leases.lease(lease).is_none() {
                            self.record_acked_lease(lease, rank, len);
                        }
                    }
                }
                Event::Commit { commit } => self.record_commit(*commit),
                Event::Reclaim(loss) => self.losses.push(loss.clone()),
                Event::World { .. } | Event::Resume { .. } | Event::Rollback { .. } => {
                    if let Event::Rollback { commit } = event {
                        self.apply_rollback(*commit);
                    }
                    self.add_ranks();
                    began = self.leases.clone();
                }
                _ => {}
            }
        }
        Ok(began)
    }
}
