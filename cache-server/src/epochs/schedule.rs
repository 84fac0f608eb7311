//! What an epoch is made of: the entries it delivers and what each is, whoever chooses among them.

use super::Setup;
use crate::epochs::{JobError, replay_source::ReplaySource};
use fletch_core::{
    delivery::Leases,
    order::{Bucketed, Buckets, Strict},
    plan::{Bits, Item, Plan, World},
};
use std::sync::Arc;

/// See the module.
pub enum Schedule {
    /// Pads and what is left out are those of the strict order.
    Strict(Arc<Strict>),
    /// They are those of each bucket.
    Buckets(Arc<Bucketed>),
    /// What a ledger tells, of an epoch that was of this schedule.
    Replay(Arc<ReplaySource>, Box<Schedule>),
}

impl Schedule {
    /// What an epoch that began in the world `fit` is made of.
    ///
    /// # Errors
    /// [`JobError::Buckets`].
    pub fn new(setup: &Setup, epoch: u64, world: World) -> Result<Self, JobError> {
        Ok(match &setup.told {
            None => Schedule::first(setup, epoch, world)?,
            Some(told) => {
                let of = Schedule::first(setup, told.header.epoch, told.header.world)?;
                Schedule::Replay(Arc::clone(told), Box::new(of))
            }
        })
    }

    /// One that no ledger tells.
    fn first(setup: &Setup, epoch: u64, world: World) -> Result<Self, JobError> {
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

    /// What an entry is, pads included.
    pub fn item(&self, entry: u32) -> Item {
        match self {
            Schedule::Strict(strict) => strict.item(entry),
            Schedule::Buckets(order) => order.item(entry),
            Schedule::Replay(_, of) => of.item(entry),
        }
    }

    /// What the epoch delivers: over the plan's entries, and pads that are known from the beginning.
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

    /// Entries of the plan.
    fn entries(&self) -> u64 {
        match self {
            Schedule::Strict(strict) => strict.plan().entries(),
            Schedule::Buckets(order) => order.plan().entries(),
            Schedule::Replay(_, of) => of.entries(),
        }
    }

    /// The entries of the plan that are left out from the beginning.
    pub fn dropped(&self) -> Vec<u32> {
        match self {
            Schedule::Strict(strict) => strict.dropped().collect(),
            Schedule::Buckets(order) => {
                let planned = order.planned();
                let out = (0..self.entries()).filter(|&e| !planned.get(e));
                out.map(|e| u32::try_from(e).unwrap_or(u32::MAX)).collect()
            }
            // Pads that were not consumed are nothing that is missing.
            Schedule::Replay(told, of) => {
                let out = (0..of.entries()).filter(|&e| !told.planned.get(e));
                out.map(|e| u32::try_from(e).unwrap_or(u32::MAX)).collect()
            }
        }
    }

    /// Who may still be granted how much, where the order says whose each entry is.
    pub fn share(&self, leases: &mut Leases) -> Result<(), JobError> {
        let shares = match self {
            Schedule::Strict(_) => return Ok(()),
            Schedule::Buckets(order) => order.with_ranks(leases.world().ranks)?.shares(|e| leases.is_free(e)),
            Schedule::Replay(told, _) => told.shares(|e| leases.is_free(e)),
        };
        leases.share_as(&shares);
        Ok(())
    }

    /// Whether an epoch of which `acked` was delivered, in the world `now`, may go on in the world `fit`.
    ///
    /// # Errors
    /// [`JobError::MidStep`].
    pub fn may_become(&self, epoch: u64, acked: &Bits, now: World, world: World) -> Result<(), JobError> {
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
