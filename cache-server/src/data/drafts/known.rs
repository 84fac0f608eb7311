//! How much of each draft in use is known.

use super::seals::Seals;
use crate::{data::versions::Sources, tenancy::state::RegistrationHandle};
use fletch_api::Draft;
use fletch_core::{DatasetName, Domain, Root};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

/// A count rests for so many times as long as it took.
const REST_FACTOR: u32 = 20;

/// A draft is sealed unasked only if at most one of so many of its bytes is read again for that.
const READ_AGAIN: u64 = 10;

/// The last count of a draft.
struct Counted {
    draft: Draft,
    /// The bytes of its tar shards.
    shard_bytes: u64,
    /// The rows of the table of learned names before the count.
    rows: u64,
    /// The next count begins after this time.
    rests_until: Instant,
}

type DraftKey = (Domain, DatasetName, Root);

/// The last count of each draft in use.
#[derive(Default)]
pub struct KnownShares(Mutex<BTreeMap<DraftKey, Counted>>);

impl KnownShares {
    /// Returns the drafts of a domain, in the order of the names of their datasets.
    pub fn of(&self, domain: &Domain) -> Vec<Draft> {
        let all = self.0.lock();
        all.iter().filter(|(key, _)| key.0 == *domain).map(|(_, counted)| counted.draft.clone()).collect()
    }

    /// Returns the bytes that are known, and those that are not.
    pub fn bytes(&self) -> (u64, u64) {
        let all = self.0.lock();
        let of_one = |counted: &Counted| (counted.draft.known_bytes, counted.draft.bytes);
        let (known, bytes) = all.values().map(of_one).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        (known, bytes - known)
    }

    /// Whether to count a draft now, of which a table of `rows` rows may know more than at the last count.
    fn is_due(&self, key: &DraftKey, rows: u64) -> bool {
        match self.0.lock().get(key) {
            Some(last) => last.rows != rows && Instant::now() >= last.rests_until,
            None => true,
        }
    }
}

impl Seals {
    /// Counts what is known of each draft in use. Returns those that can be sealed almost without reading.
    pub(super) async fn count_known(&self) -> Vec<(Arc<RegistrationHandle>, Root)> {
        let drafts = self.context.versions.drafts_in_use();
        let keys: HashSet<DraftKey> = drafts.iter().map(|sources| key_of(sources)).collect();
        self.shares.0.lock().retain(|key, _| keys.contains(key));
        for sources in &drafts {
            let (key, rows) = (key_of(sources), self.context.versions.learned().counts().0);
            if !self.shares.is_due(&key, rows) {
                continue;
            }
            let began = Instant::now();
            match self.context.versions.known_share(sources).await {
                Ok((draft, shard_bytes)) => {
                    let rest = (began.elapsed() * REST_FACTOR).max(Duration::from_secs(1));
                    let counted = Counted { draft, shard_bytes, rows, rests_until: Instant::now() + rest };
                    self.shares.0.lock().insert(key, counted);
                }
                // Readers of the draft meet the same error, and say it.
                Err(e) => tracing::debug!(draft = %key.2, error = %e, "what is known was not counted"),
            }
        }
        let all = self.shares.0.lock();
        let whole = all.iter().filter(|(_, Counted { draft, shard_bytes, .. })| {
            draft.known_files == draft.files && shard_bytes * READ_AGAIN <= draft.bytes
        });
        let whole: Vec<DraftKey> = whole.map(|(key, _)| key.clone()).collect();
        drop(all);
        let entries = whole.into_iter().filter_map(|(domain, dataset, root)| {
            let entry = self.context.registrations.get(&domain, &dataset)?;
            Some((entry, root))
        });
        entries.collect()
    }
}

fn key_of(sources: &Sources) -> DraftKey {
    (sources.domain.clone(), sources.dataset().clone(), sources.first.version.root())
}
