//! The plan of a declaration, and its buckets.

use crate::data::versions::Source;
use crate::{
    data::versions::Samples,
    training::epochs::{BucketedPlan, JobError},
};
use fletch_api::{BucketSpec, OrderKind, PlanBase, StartJob, WeightOf, epochs::WANT_MAX, jobs::PREFIXES_MAX};
use fletch_core::{
    Root,
    order::{Buckets, bucketed::BadBuckets},
    plan::{OrderKey, Plan, World},
};

/// Most bytes of a ledger for each granted entry.
const ENTRY_BYTES: u64 = 5;
/// Most bytes of a ledger for each lease with its ack.
const LEASE_BYTES: u64 = 96;

/// Returns weights of all samples from weights of some; the others weigh 0.
fn spread(samples: u64, of: &[u64], given: impl ExactSizeIterator<Item = f64>) -> Result<Vec<f64>, JobError> {
    if of.len() != given.len() {
        return Err(JobError::InvalidPlan(format!("{} weights for {} samples", given.len(), of.len())));
    }
    let mut all: Vec<Option<f64>> = vec![None; usize::try_from(samples).unwrap_or(usize::MAX)];
    for (&s, weight) in of.iter().zip(given) {
        let slot = usize::try_from(s).ok().and_then(|s| all.get_mut(s));
        let slot = slot.ok_or_else(|| {
            JobError::InvalidPlan(format!(
                "the weights name sample {s}, but the version has {samples} samples"
            ))
        })?;
        if slot.replace(weight).is_some() {
            return Err(JobError::InvalidPlan(format!("sample {s} has two weights")));
        }
    }
    Ok(all.into_iter().map(|w| w.unwrap_or(0.0)).collect())
}

/// Returns the plan divided into the buckets of a declaration, for orders that need them.
pub(super) async fn bucketed_of(
    ask: &StartJob,
    plan: &Plan,
    source: &Source,
    samples: &Samples,
) -> Result<Option<BucketedPlan>, JobError> {
    let spec = match (ask.order, &ask.buckets) {
        (OrderKind::Bucketed, Some(spec)) => spec,
        (OrderKind::Bucketed, None) => {
            return Err(JobError::InvalidPlan(
                "the order bucketed needs buckets: lengths, prefixes or groups".into(),
            ));
        }
        // The recorded epoch of a replay may have had buckets.
        (OrderKind::Replay, Some(spec)) => spec,
        (_, Some(_)) => return Err(JobError::InvalidPlan("only the order bucketed takes buckets".into())),
        (_, None) => return Ok(None),
    };
    let buckets = match spec {
        BucketSpec::Lengths(bounds) => Buckets::by_length(samples.lengths(source).await?, bounds)?,
        BucketSpec::Groups(groups) => Buckets::new(groups.clone())?,
        BucketSpec::Prefixes(prefixes) if prefixes.len() > PREFIXES_MAX => {
            return Err(JobError::InvalidPlan(format!("more than {PREFIXES_MAX} prefixes")));
        }
        BucketSpec::Prefixes(prefixes) => {
            let mut of = Vec::new();
            let none = prefixes.len();
            let see = |key: &str| {
                let first = prefixes.iter().position(|p| key.starts_with(p.as_str())).unwrap_or(none);
                of.push(u32::try_from(first).unwrap_or(u32::MAX));
            };
            samples.each_key(source, see).await?;
            Buckets::new(of)?
        }
    };
    if buckets.len() != plan.samples() as usize {
        let (buckets, samples) = (buckets.len(), plan.samples());
        return Err(BadBuckets::Samples { buckets, samples }.into());
    }
    Ok(Some(BucketedPlan::new(buckets, plan)))
}

/// Returns the plan of a declaration.
pub(super) async fn plan_of(
    ask: &StartJob,
    seed: u64,
    root: Root,
    source: &Source,
    samples: &Samples,
) -> Result<Plan, JobError> {
    let n = samples.len();
    let plan = match &ask.plan.base {
        PlanBase::All => Plan::all(n)?,
        PlanBase::Samples(list) => Plan::subset(n, list.iter().copied())?,
        PlanBase::Keys(keys) => Plan::subset(n, samples.numbers(source, keys).await?)?,
        PlanBase::Weights(w) => {
            let key = OrderKey::new(root, Plan::all(n)?.hash(), seed, 0);
            let given = w.weights.iter().map(|w| w.unwrap_or(f64::NAN));
            let numbers = match &w.of {
                None => None,
                Some(WeightOf::Samples(numbers)) => Some(numbers.clone()),
                Some(WeightOf::Keys(keys)) => Some(samples.numbers(source, keys).await?),
            };
            let weights = match numbers {
                None => given.collect(),
                Some(numbers) => spread(n, &numbers, given)?,
            };
            Plan::weighted(n, &weights, w.draws, &key)?
        }
    };
    Ok(match ask.plan.echo {
        Some(e) => plan.echoed(e.copies, e.apart)?,
        None => plan,
    })
}

/// Checks whether an epoch of this plan in this world fits a ledger of `most` bytes.
///
/// The ledger needs room for every entry once, in leases of a rank's part of a step: an epoch whose ledger is
/// full could not end. Pads may not be more than that.
pub(super) fn check_ledger_size(
    plan: &Plan,
    bucketed: Option<&BucketedPlan>,
    world: World,
    most: u64,
) -> Result<(), JobError> {
    let n = plan.entries();
    fits_a_ledger(bucketed.map_or_else(|| n.max(world.delivered(n)), |c| c.entries(world)), world, most)
}

fn fits_a_ledger(entries: u64, world: World, most: u64) -> Result<(), JobError> {
    let lease = u64::from(world.batch / world.ranks.max(1)).clamp(1, WANT_MAX.into());
    let room = most / (ENTRY_BYTES + LEASE_BYTES.div_ceil(lease));
    if entries <= room {
        return Ok(());
    }
    let why = format!(
        "the plan has {entries} entries with its pads; the ledger of an epoch has room for {room} in \
         batches of {lease} a rank (limits.ledger_bytes)"
    );
    Err(JobError::InvalidPlan(why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::{
        delivery::{Event, Request},
        plan::Tail,
    };

    /// The entries have the longest numbers that there are.
    #[test]
    fn a_ledger_has_room_for_every_entry_once() {
        let most = 1 << 30;
        for batch in [1, 7, 64, WANT_MAX] {
            let world = World { ranks: 3, batch: 3 * batch, tail: Tail::Keep };
            let refused = fits_a_ledger(u64::MAX, world, most).expect_err("too many").to_string();
            let room =
                refused.split("room for ").nth(1).and_then(|r| r.split(' ').next()?.parse::<u64>().ok());
            let room = room.expect("it says for how many");
            assert!(
                fits_a_ledger(room, world, most).is_ok() && fits_a_ledger(room + 1, world, most).is_err()
            );
            let last = u32::try_from(room).expect("a number");
            let entries = (0..batch).map(|i| if i % 2 == 0 { i } else { last - i }).collect();
            let request = Request { rank: 65_535, worker: u32::MAX, sequence: 1 << 51 };
            let mut of_a_lease = Vec::new();
            Event::Grant { lease: 1 << 51, request, entries }.append(&mut of_a_lease);
            Event::Ack { lease: 1 << 51, upto: batch }.append(&mut of_a_lease);
            let all = of_a_lease.len() as u64 * room.div_ceil(batch.into());
            assert!(all < most, "{all} bytes in leases of {batch}");
        }
    }
}
