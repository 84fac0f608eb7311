//! A ledger as an order: what each rank acknowledged then, it gets again.
//!
//! 1. What is replayed was checked as a ledger of this job's root, plan and seed: whatever it names is an entry, or a pad
//!    of the epoch it was written by.
//! 2. Each rank has its own sequence, whatever its requests are: the world may change in its batch, never in its ranks.

use super::{JobError, Schedule, Setup};
use fletch_api::{OrderKind, StartJob};
use fletch_core::{
    delivery::{
        Leases,
        ledger::{Header, Ledger},
    },
    order::Replay,
    plan::{Bits, World},
};

/// See the module.
pub struct ReplaySource {
    /// Of which epoch.
    pub header: Header,
    /// What each rank is told, in order.
    pub ranks: Vec<Vec<u32>>,
    /// All of it.
    pub planned: Bits,
}

/// The ledger that was asked for, where the order needs one.
///
/// # Errors
/// [`JobError::BadLedger`], [`JobError::Ask`].
pub fn ledger_of(ask: &StartJob) -> Result<Option<Ledger>, JobError> {
    let bytes = match (ask.order, &ask.replay) {
        (OrderKind::Replay, Some(spec)) => &spec.ledger.0,
        (OrderKind::Replay, None) => {
            return Err(JobError::Ask("an order replay needs the ledger to replay".into()));
        }
        (_, Some(_)) => return Err(JobError::Ask("only an order replay has a ledger".into())),
        (_, None) => return Ok(None),
    };
    let read = Ledger::read(bytes).map_err(|e| JobError::BadLedger(e.to_string()))?;
    if read.len != bytes.len() {
        return Err(JobError::BadLedger("the ledger ends in the middle of a record".into()));
    }
    let order = read.header.order.as_str();
    let told = [OrderKind::Substitute, OrderKind::Strict, OrderKind::Bucketed].map(OrderKind::as_str);
    if !told.contains(&order) {
        return Err(JobError::BadLedger(format!(
            "the ledger is of an order {order}; replay one of {}",
            told.join(", ")
        )));
    }
    Ok(Some(read))
}

impl ReplaySource {
    /// What a ledger tells an epoch of this job. Takes as long as its epoch is: not for a thread that others wait for.
    ///
    /// # Errors
    /// [`JobError::BadLedger`].
    pub fn new(setup: &Setup, ledger: &Ledger) -> Result<Self, JobError> {
        let bad = |why: String| Err(JobError::BadLedger(why));
        let header = ledger.header.clone();
        let by_units = setup.block > 0;
        let pairs = [
            ("root", header.root.to_string(), setup.root.to_string()),
            ("plan", header.plan.to_string(), setup.hash.to_string()),
            ("seed", header.seed.to_string(), setup.seed.to_string()),
        ];
        let layout = by_units.then(|| ("layout", header.layout.to_string(), setup.layout.to_string()));
        if let Some((what, got, want)) = pairs.into_iter().chain(layout).find(|(_, a, b)| a != b) {
            return bad(format!("the ledger's {what} is {got}, the job's is {want}"));
        }
        // That it names only what there is: it is applied to the epoch it says it is of.
        let of = Schedule::new(setup, header.epoch, header.world)?;
        let mut leases = Leases::new(of.planned(), header.world)?;
        let told = Replay::borne_out(ledger, &mut leases).map_err(|e| JobError::BadLedger(e.to_string()))?;
        if told.legs().is_empty() {
            return bad("nothing was acknowledged in the ledger".into());
        }
        let Some(ranks) = told.by_rank() else {
            return bad("the number of ranks changes in the middle of the ledger".into());
        };
        let last = ranks.iter().flatten().map(|&e| u64::from(e) + 1).max().unwrap_or(0);
        let known = of.planned().len();
        // Leases make pads where a world's last step is short; buckets are padded from the beginning, and have no others.
        if matches!(of, Schedule::Buckets(_)) && last > known {
            return bad(format!(
                "the ledger names entry {}; its buckets have {known} with their pads",
                last - 1
            ));
        }
        let mut planned = Bits::zeros(last.max(known));
        ranks.iter().flatten().for_each(|&e| {
            planned.set(u64::from(e));
        });
        Ok(ReplaySource { header, ranks, planned })
    }

    /// Whether it can be told in this world.
    ///
    /// # Errors
    /// [`JobError::Ask`].
    pub fn check(&self, world: World) -> Result<(), JobError> {
        if self.ranks.len() == world.ranks as usize {
            return Ok(());
        }
        let (told, asked) = (self.ranks.len(), world.ranks);
        Err(JobError::Ask(format!("the ledger tells the order of {told} ranks, and the world has {asked}")))
    }

    /// The j-th entry of a rank.
    #[must_use]
    pub fn turn(&self, rank: u32, j: u64) -> Option<u32> {
        self.ranks.get(rank as usize)?.get(usize::try_from(j).ok()?).copied()
    }

    /// Steps in this world.
    #[must_use]
    pub fn steps(&self, world: World) -> u64 {
        let longest = self.ranks.iter().map(Vec::len).max().unwrap_or(0) as u64;
        longest.div_ceil(u64::from((world.batch / world.ranks.max(1)).max(1)))
    }

    /// How many entries each rank may still be granted, from what is `free`.
    pub fn shares(&self, free: impl Fn(u32) -> bool) -> Vec<u64> {
        self.ranks.iter().map(|all| all.iter().filter(|&&e| free(e)).count() as u64).collect()
    }
}
