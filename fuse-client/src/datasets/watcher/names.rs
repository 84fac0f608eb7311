//! The names that a directory should have, and the versions that they mean, as the server says.

use super::{super::directory::NOT_MOUNTED, AT_ONCE, Name, Problem, Watcher};
use fletch_client::ClientError;
use fletch_core::{DatasetName, Kind, TagName};
use futures::{StreamExt as _, stream};
use globset::GlobMatcher;
use std::{collections::BTreeMap, sync::atomic::Ordering::Relaxed, time::Duration};

/// How long a call about names may take. The next pass asks again.
const ASK_WITHIN: Duration = Duration::from_secs(10);
/// The most names. Whoever can write tags could otherwise fill the directory, and cost a call for each.
const NAMES_MAX: usize = 8192;

/// Keeps the first `names_max` names: first `latest` of each dataset by name, then other tags by name.
/// Returns whether there were more.
fn keep_first(pairs: &mut Vec<(DatasetName, TagName)>, names_max: usize) -> bool {
    let is_cut = pairs.len() > names_max;
    if is_cut {
        // Answers come in any order. Names must not come and go with it.
        let latest = TagName::latest();
        pairs.sort_by_cached_key(|(dataset, tag)| (*tag != latest, dataset.to_string(), tag.to_string()));
        pairs.truncate(names_max);
    }
    is_cut
}

impl Watcher {
    /// Asks the server for all names, and for the version of each.
    pub(super) async fn wanted_names(&self) -> Result<BTreeMap<String, Name>, ClientError> {
        let client = self.client.within(ASK_WITHIN.min(self.client.io_timeout()));
        let mut datasets = client.datasets().await?;
        // The link would take the place of the file by which the directory says that it is closed.
        let before = datasets.len();
        datasets.retain(|d| d.name.as_str() != NOT_MOUNTED);
        if datasets.len() < before && !self.has_left_out.swap(true, Relaxed) {
            tracing::warn!(
                "the dataset {NOT_MOUNTED} has no directory, because a file of that name says that nothing \
                 is mounted; register it under another name, or mount it with `fletch mount`"
            );
        }
        let mut pairs: Vec<(DatasetName, TagName)> =
            datasets.iter().map(|d| (d.name.clone(), TagName::latest())).collect();
        if let Some(glob) = &self.rules.tags {
            let lists = stream::iter(datasets.iter().map(|d| {
                let (client, name) = (&client, &d.name);
                async move { (name, client.tags(name).await) }
            }));
            let mut lists = lists.buffer_unordered(AT_ONCE);
            while let Some((dataset, tags)) = lists.next().await {
                pairs.extend(self.matching_tags(dataset, tags, glob));
            }
        }
        self.limit_names(&mut pairs);
        let asked = stream::iter(pairs.into_iter().map(|(dataset, tag)| {
            let client = &client;
            async move {
                let resolved = client.resolve(&dataset, tag.as_str()).await;
                (dataset, tag, resolved)
            }
        }));
        let answers: Vec<_> = asked.buffer_unordered(AT_ONCE).collect().await;
        let mut names = BTreeMap::new();
        for (dataset, tag, resolved) in answers {
            let is_latest = tag == TagName::latest();
            let name = if is_latest { dataset.to_string() } else { format!("{dataset}@{tag}") };
            let (wanted, problem) = match resolved {
                Ok(resolved) => (Some(resolved), None),
                // A tag that was deleted since it was listed.
                Err(e) if !is_latest && e.kind() == Kind::NotFound => continue,
                Err(e) => (None, Some(Problem::Failed(e.to_string()))),
            };
            names.insert(name, Name { dataset, tag, wanted, linked: None, problem });
        }
        Ok(names)
    }

    fn limit_names(&self, pairs: &mut Vec<(DatasetName, TagName)>) {
        let is_cut = keep_first(pairs, NAMES_MAX);
        if is_cut && !self.names_cut.load(Relaxed) {
            tracing::warn!(
                names_max = NAMES_MAX,
                "there are more names than links: the last tags have none; give a narrower --tags"
            );
        }
        self.names_cut.store(is_cut, Relaxed);
    }

    /// Returns the tags of a dataset to mount. While the server cannot list them, the tags stay as they are.
    fn matching_tags(
        &self,
        dataset: &DatasetName,
        tags: Result<Vec<TagName>, ClientError>,
        glob: &GlobMatcher,
    ) -> Vec<(DatasetName, TagName)> {
        let latest = TagName::latest();
        let tags: Vec<TagName> = match tags {
            Ok(tags) => tags.into_iter().filter(|tag| glob.is_match(tag.as_str())).collect(),
            Err(error) => {
                let text = "cannot list the tags of a dataset: its links stay as they are";
                if self.tags_failed.swap(true, Relaxed) {
                    tracing::debug!(%dataset, %error, "{text}");
                } else {
                    tracing::warn!(%dataset, %error, "{text}; further failures are logged at debug level");
                }
                let state = self.state();
                let known = state.names.values().filter(|name| name.dataset == *dataset);
                known.map(|name| name.tag.clone()).collect()
            }
        };
        tags.into_iter().filter(|tag| *tag != latest).map(|tag| (dataset.clone(), tag)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_tags_have_no_room_before_the_latest_ones() {
        let pair =
            |dataset, tag| (DatasetName::new(dataset).expect("name"), TagName::new(tag).expect("name"));
        let all =
            [pair("b", "v2"), pair("b", "latest"), pair("a", "v1"), pair("a", "latest"), pair("b", "v1")];
        let mut kept = all.to_vec();
        assert!(keep_first(&mut kept, 3));
        assert_eq!(kept, [pair("a", "latest"), pair("b", "latest"), pair("a", "v1")]);
        let mut kept = all.to_vec();
        assert!(!keep_first(&mut kept, 5) && kept == all);
    }
}
