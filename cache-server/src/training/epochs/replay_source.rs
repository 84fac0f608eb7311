//! The source of the order `replay`: a ledger, whose acknowledged entries each rank gets again.
//!
//! 1. The ledger was checked against this job's root, plan and seed: every entry in it is an entry of the
//!    plan, or a pad of the epoch that wrote it.
//! 2. Each rank has its own sequence, whatever its requests are: the batch may change, the ranks may not.

use super::{JobError, JobSetup, Schedule};
use fletch_api::{OrderKind, StartJob};
use fletch_core::{
    delivery::{
        Leases,
        ledger::{Header, Ledger},
    },
    order::Replay,
    plan::{Bits, World},
};

/// The recorded sequences of all ranks.
pub struct ReplaySource {
    /// The header of the recorded epoch's ledger.
    pub header: Header,
    /// By rank: the entries in recorded order.
    pub ranks: Vec<Vec<u32>>,
    /// All recorded entries.
    pub planned: Bits,
}

/// Reads the ledger of a request for the order `replay`; `None` for other orders.
///
/// # Errors
/// [`JobError::BadLedger`], [`JobError::InvalidPlan`].
pub fn replayed_ledger(ask: &StartJob) -> Result<Option<Ledger>, JobError> {
    let bytes = match (ask.order, &ask.replay) {
        (OrderKind::Replay, Some(spec)) => &spec.ledger.0,
        (OrderKind::Replay, None) => {
            return Err(JobError::InvalidPlan("the order replay needs a ledger to replay".into()));
        }
        (_, Some(_)) => return Err(JobError::InvalidPlan("only the order replay takes a ledger".into())),
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
            "the ledger has the order {order}; only {} can be replayed",
            told.join(", ")
        )));
    }
    Ok(Some(read))
}

impl ReplaySource {
    /// Reads the recorded sequences from a ledger. Blocking: takes time in proportion to the recorded epoch.
    ///
    /// # Errors
    /// [`JobError::BadLedger`].
    pub fn new(setup: &JobSetup, ledger: &Ledger) -> Result<Self, JobError> {
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
        // Applying the ledger to its own epoch proves that it names only entries of that epoch.
        let of = Schedule::new(setup, header.epoch, header.world)?;
        let mut leases = Leases::new(of.planned(), header.world)?;
        let told = Replay::checked(ledger, &mut leases).map_err(|e| JobError::BadLedger(e.to_string()))?;
        if told.stretches().is_empty() {
            return bad("the ledger has no acknowledged entry".into());
        }
        let Some(ranks) = told.by_rank() else {
            return bad("the number of ranks changes in the middle of the ledger".into());
        };
        let last = ranks.iter().flatten().map(|&e| u64::from(e) + 1).max().unwrap_or(0);
        let known = of.planned().len();
        // Leases add pads where the last step of a world is short. Buckets have all their pads from the
        // beginning.
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

    /// Checks whether the ledger can be replayed in this world.
    ///
    /// # Errors
    /// [`JobError::InvalidPlan`].
    pub fn check(&self, world: World) -> Result<(), JobError> {
        if self.ranks.len() == world.ranks as usize {
            return Ok(());
        }
        let (told, asked) = (self.ranks.len(), world.ranks);
        Err(JobError::InvalidPlan(format!("the ledger has {told} ranks, and the world has {asked}")))
    }

    /// Returns the j-th entry of a rank.
    #[must_use]
    pub fn entry_at(&self, rank: u32, j: u64) -> Option<u32> {
        self.ranks.get(rank as usize)?.get(usize::try_from(j).ok()?).copied()
    }

    /// Returns the number of steps in this world.
    #[must_use]
    pub fn steps(&self, world: World) -> u64 {
        let longest = self.ranks.iter().map(Vec::len).max().unwrap_or(0) as u64;
        longest.div_ceil(u64::from((world.batch / world.ranks.max(1)).max(1)))
    }

    /// Returns how many free entries each rank may still be granted.
    pub fn shares(&self, free: impl Fn(u32) -> bool) -> Vec<u64> {
        self.ranks.iter().map(|all| all.iter().filter(|&&e| free(e)).count() as u64).collect()
    }
}
