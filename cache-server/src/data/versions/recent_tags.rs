//! Tags that were resolved a moment ago, for readers that name a tag in each request.
//!
//! A program of Fletch resolves a tag once, when it starts. An S3 client has no such moment: each of its
//! requests names the tag, and reading it from the origin each time would cost more than the object.

use super::{Source, VersionError, Versions};
use crate::tenancy::state::RegistrationHandle;
use fletch_core::{DatasetName, Domain, TagName};
use moka::sync::Cache;
use std::{sync::Arc, time::Duration};
use tokio::sync::OnceCell;

/// For how long readers get the version that a tag had. A moved tag is noticed after this time.
const TTL: Duration = Duration::from_secs(2);
/// The most tags that are remembered.
const TAGS_MAX: u64 = 10_000;

type TagKey = (Domain, DatasetName, TagName);

/// A tag that is being resolved or was resolved, through this registration.
#[derive(Clone)]
struct Resolved {
    through: Arc<RegistrationHandle>,
    source: Arc<OnceCell<Arc<Source>>>,
}

/// The tags that were resolved lately.
pub struct RecentTags(Cache<TagKey, Resolved>);

impl Default for RecentTags {
    fn default() -> Self {
        RecentTags(Cache::builder().max_capacity(TAGS_MAX).time_to_live(TTL).build())
    }
}

impl Versions {
    /// Resolves a tag of a dataset, at most two seconds late. Callers that come together share one read.
    ///
    /// # Errors
    /// As [`Versions::resolve_tag`].
    pub async fn resolve_recent_tag(
        self: &Arc<Self>,
        entry: &Arc<RegistrationHandle>,
        tag: &TagName,
    ) -> Result<Arc<Source>, VersionError> {
        let key = (entry.domain.clone(), entry.dataset.name.clone(), tag.clone());
        let new = || Resolved { through: Arc::clone(entry), source: Arc::default() };
        let mut known = self.recent_tags.0.get_with(key.clone(), new);
        if !Arc::ptr_eq(&known.through, entry) {
            // The name was registered anew meanwhile.
            known = new();
            self.recent_tags.0.insert(key, known.clone());
        }
        let source = known.source.get_or_try_init(|| self.resolve_tag(entry, tag)).await?;
        if source.is_registered() { Ok(Arc::clone(source)) } else { Err(VersionError::NotFound) }
    }
}
