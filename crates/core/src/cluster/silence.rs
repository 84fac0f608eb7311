//! Silent members: those of the ring that were not up for some time, by one observer's clock.
//!
//! I1. A member is silent for as long as every observation says so, and no longer than the observer watched.
//! I2. An observer that was cut off knows nothing of the gap, so it begins to count again.

use crate::names::MemberId;
use std::{collections::BTreeMap, time::Duration};

/// Since when which members are silent. Times are of the observer's monotonic clock.
#[derive(Debug, Clone, Default)]
pub struct Silence {
    since: BTreeMap<MemberId, Duration>,
    observed: Option<Duration>,
}

impl Silence {
    /// Records which members are not up now. Observations may be at most `gap_max` apart.
    pub fn observe<'a>(
        &mut self,
        now: Duration,
        gap_max: Duration,
        silent: impl IntoIterator<Item = &'a MemberId>,
    ) {
        let is_gap = self.observed.is_none_or(|last| now.saturating_sub(last) > gap_max);
        let before = if is_gap { BTreeMap::new() } else { std::mem::take(&mut self.since) };
        self.since =
            silent.into_iter().map(|id| (id.clone(), before.get(id).copied().unwrap_or(now))).collect();
        self.observed = Some(now);
    }

    /// Returns the members that were silent for at least `forget_after`.
    #[must_use]
    pub fn longer_than(&self, forget_after: Duration) -> Vec<MemberId> {
        let now = self.observed.unwrap_or_default();
        let old = self.since.iter().filter(|(_, since)| now.saturating_sub(**since) >= forget_after);
        old.map(|(id, _)| id.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ids() -> Vec<MemberId> {
        ["a", "b", "c"].map(|id| MemberId::new(id).expect("a name")).into()
    }

    proptest! {
        /// I1 and I2, against the definition: look back over all observations.
        #[test]
        fn silence_is_what_was_observed(
            steps in proptest::collection::vec((0u64..15, 0usize..8), 1..60),
            forget_s in 1u64..40,
        ) {
            let (gap, forget) = (Duration::from_secs(10), Duration::from_secs(forget_s));
            let (mut silence, mut now, mut past) = (Silence::default(), Duration::ZERO, Vec::new());
            for (wait, set) in steps {
                now += Duration::from_secs(wait);
                let silent: Vec<MemberId> =
                    (0..3).filter(|i| set >> i & 1 == 1).map(|i| ids()[i].clone()).collect();
                silence.observe(now, gap, &silent);
                past.push((now, silent));
                for id in ids() {
                    let mut since = None;
                    let mut later = now;
                    for (at, silent) in past.iter().rev() {
                        if later - *at > gap || !silent.contains(&id) {
                            break;
                        }
                        (since, later) = (Some(*at), *at);
                    }
                    let want = since.is_some_and(|since| now - since >= forget);
                    prop_assert_eq!(silence.longer_than(forget).contains(&id), want);
                }
            }
        }
    }
}
