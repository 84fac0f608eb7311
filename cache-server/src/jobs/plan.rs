//! From what was asked for to a plan.

use super::{JobError, Samples};
use crate::versions::Source;
use fletch_api::{PlanBase, StartJob};
use fletch_core::{
    Root,
    order::{OrderKey, Plan},
};

/// The plan that was asked for.
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
            let weights: Vec<f64> = w.weights.iter().map(|w| w.unwrap_or(f64::NAN)).collect();
            Plan::weighted(n, &weights, w.draws, &key)?
        }
    };
    Ok(match ask.plan.echo {
        Some(e) => plan.echoed(e.copies, e.apart)?,
        None => plan,
    })
}
