//! The schedule of an epoch: the entries that it delivers, and which sample each entry is.

use super::JobSetup;
use crate::training::epochs::{JobError, replay_source::ReplaySource};
use fletch_core::{
    delivery::Leases,
    order::{Bucketed, Buckets, Strict},
    plan::{Bits, Item, Plan, World},
};
use std::sync::Arc;

/// The entries of one epoch, whatever chooses their sequence.
pub enum Schedule {
    /// Pads and dropped entries are those of the strict order.
    Strict(Arc<Strict>),
    /// Pads and dropped entries are those of each bucket.
    Buckets(Arc<Bucketed>),
    /// The entries are those that a ledger recorded, of an epoch with the inner schedule.
    Replay(Arc<ReplaySource>, Box<Schedule>),
}

impl Schedule {
    /// Returns the schedule of an epoch that begins in a world.
    ///
    /// # Errors
    /// [`JobError::Buckets`].
    pub fn new(setup: &JobSetup, epoch: u64, world: World) -> Result<Self, JobError> {
        Ok(match &setup.replay {
            None => Schedule::first(setup, epoch, world)?,
            Some(told) => {
                let of = Schedule::first(setup, told.header.epoch, told.header.world)?;
                Schedule::Replay(Arc::clone(told), Box::new(of))
            }
        })
    }

    /// Returns the schedule of an epoch that replays no ledger.
    fn first(setup: &JobSetup, epoch: u64, world: World) -> Result<Self, JobError> {
        let (plan, key) = (setup.plan.clone(), setup.key(epoch));
        if let Some(bucketed) = &setup.bucketed {
            return Ok(Schedule::Buckets(Arc::new(Bucketed::new(
                plan,
                world,
                &key,
                bucketed.buckets.clone(),
            )?)));
        }
        let strict = match setup.block {
            0 => Strict::new(plan, world, key),
            block => Strict::by_units(plan, world, key, setup.plan_units.clone(), block),
        };
        Ok(Schedule::Strict(Arc::new(strict)))
    }

    /// Returns the sample and copy of an entry, pads included.
    pub fn item(&self, entry: u32) -> Item {
        match self {
            Schedule::Strict(strict) => strict.item(entry),
            Schedule::Buckets(order) => order.item(entry),
            Schedule::Replay(_, of) => of.item(entry),
        }
    }

    /// Returns the entries that the epoch delivers, with the pads that are known from the beginning.
    pub fn planned(&self) -> Bits {
        match self {
            Schedule::Strict(strict) => {
                let mut bits = Bits::ones(strict.plan().entries());
                strict.dropped().for_each(|e| {
                    bits.clear(u64::from(e));
                });
                bits
            }
            Schedule::Buckets(order) => order.planned(),
            Schedule::Replay(told, _) => told.planned.clone(),
        }
    }

    /// Returns the number of the plan's entries.
    fn entries(&self) -> u64 {
        match self {
            Schedule::Strict(strict) => strict.plan().entries(),
            Schedule::Buckets(order) => order.plan().entries(),
            Schedule::Replay(_, of) => of.entries(),
        }
    }

    /// Returns the plan's entries that the epoch leaves out from the beginning.
    pub fn dropped(&self) -> Vec<u32> {
        match self {
            Schedule::Strict(strict) => strict.dropped().collect(),
            Schedule::Buckets(order) => {
                let planned = order.planned();
                let out = (0..self.entries()).filter(|&e| !planned.get(e));
                out.map(|e| u32::try_from(e).unwrap_or(u32::MAX)).collect()
            }
            // Pads that the recorded epoch did not consume are not missing.
            Schedule::Replay(told, of) => {
                let out = (0..of.entries()).filter(|&e| !told.planned.get(e));
                out.map(|e| u32::try_from(e).unwrap_or(u32::MAX)).collect()
            }
        }
    }

    /// Sets what each rank may still be granted, where the order assigns every entry to a rank.
    pub fn share(&self, leases: &mut Leases) -> Result<(), JobError> {
        let shares = match self {
            Schedule::Strict(_) => return Ok(()),
            Schedule::Buckets(order) => order.with_ranks(leases.world().ranks)?.shares(|e| leases.is_free(e)),
            Schedule::Replay(told, _) => told.shares(|e| leases.is_free(e)),
        };
        leases.share_as(&shares);
        Ok(())
    }

    /// Checks whether an epoch in the world `now` may continue in `world`; `acked` is what was delivered.
    ///
    /// # Errors
    /// [`JobError::MidStep`].
    pub fn can_enter_world(
        &self,
        epoch: u64,
        acked: &Bits,
        now: World,
        world: World,
    ) -> Result<(), JobError> {
        let order = match self {
            Schedule::Strict(_) => return Ok(()),
            Schedule::Replay(told, _) => return told.check(world),
            Schedule::Buckets(order) => order,
        };
        if now == world {
            return Ok(());
        }
        if (now.batch, now.tail) != (world.batch, world.tail) {
            let what = "the batch and the tail of a bucketed epoch stay as they began";
            return Err(JobError::MidStep { epoch, what });
        }
        let planned = order.planned();
        let free = |e: u32| planned.get(u64::from(e)) && !acked.get(u64::from(e));
        if order.at_boundary(free) {
            return Ok(());
        }
        Err(JobError::MidStep {
            epoch,
            what: "a step is delivered in part, and its other ranks' part is not",
        })
    }
}

/// A plan divided into buckets.
pub struct BucketedPlan {
    /// The bucket of each sample.
    pub buckets: Buckets,
    /// Number of the plan's entries in each bucket.
    sizes: Vec<u64>,
}

impl BucketedPlan {
    /// Divides a plan into buckets.
    #[must_use]
    pub fn new(buckets: Buckets, plan: &Plan) -> Self {
        let sizes = buckets.sizes(plan);
        BucketedPlan { buckets, sizes }
    }

    /// Steps of an epoch in this world.
    #[must_use]
    pub fn steps(&self, world: World) -> u64 {
        self.sizes.iter().map(|&n| world.steps(n)).sum()
    }

    /// Entries of the plan, and the pads of its buckets.
    #[must_use]
    pub fn entries(&self, world: World) -> u64 {
        self.sizes.iter().map(|&n| n.max(world.delivered(n))).sum()
    }
}
