//! What a watcher tells others: counters for metrics, and announcements for the server.

use super::{Problem, Watcher};
use crate::metrics::{DatasetsSnapshot, Snapshot};
use fletch_api::{
    AnnounceMount,
    mounts::{DIR_BYTES_MAX, PROBLEM_BYTES_MAX},
};
use std::{collections::BTreeMap, path::PathBuf, sync::atomic::Ordering::Relaxed};

impl Watcher {
    /// Returns all counters of the process. `shared` has those of the shared parts.
    #[must_use]
    pub fn snapshot(&self, shared: Snapshot) -> Snapshot {
        let mut all = shared;
        let state = self.state();
        all.add_mount(&state.ended);
        let mut datasets = DatasetsSnapshot {
            mounts_max: self.rules.mounts_max as u64,
            passes: self.passes.load(Relaxed),
            passes_failed: self.passes_failed.load(Relaxed),
            ..DatasetsSnapshot::default()
        };
        for mounted in state.mounted.values() {
            all.add_mount(&Snapshot::of_mount(&mounted.mount.context));
            datasets.mounted.push((mounted.mount.dataset.to_string(), mounted.mount.root.to_string()));
        }
        for name in state.names.values() {
            datasets.linked += u64::from(name.linked.is_some());
            datasets.over_limit += u64::from(name.problem == Some(Problem::OverLimit));
            datasets.failed += u64::from(matches!(name.problem, Some(Problem::Failed(_))));
        }
        Snapshot { job: self.rules.job.to_string(), datasets: Some(datasets), ..all }
    }

    /// Returns what to tell the server about each name.
    #[must_use]
    pub fn announcements(&self) -> BTreeMap<String, AnnounceMount> {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let (mounts_max, dir) = (self.rules.mounts_max, self.dir.path());
        let state = self.state();
        let told = state.names.iter().filter_map(|(name, known)| {
            let wanted = known.wanted.as_ref().map(|v| v.root);
            let shows = if known.linked.is_some() { "shows an older version" } else { "not mounted" };
            let problem = known.problem.as_ref().map(|problem| match problem {
                Problem::OverLimit => format!("{shows}: --mounts-max {mounts_max} is reached"),
                Problem::Failed(why) => format!("{shows}: {why}"),
            });
            let announced = AnnounceMount {
                dataset: known.dataset.clone(),
                // Without a link, the version that is not mounted.
                root: known.linked.or(wanted)?,
                dir: text_of(dir.join(name)),
                host: host.trim().to_owned(),
                pid: std::process::id(),
                job: self.rules.job.clone(),
                version: known.tag.to_string(),
                problem: problem.map(|why| shortened(why, PROBLEM_BYTES_MAX)),
                // Names of one version share its mount, and so its reads.
                reads: known
                    .linked
                    .and_then(|root| state.mounted.get(&root))
                    .map(|mounted| mounted.mount.context.reads()),
            };
            Some((name.clone(), announced))
        });
        told.collect()
    }
}

fn text_of(dir: PathBuf) -> String {
    shortened(dir.to_string_lossy().into_owned(), DIR_BYTES_MAX)
}

/// Returns the text, cut to at most `bytes_max` bytes.
fn shortened(mut text: String, bytes_max: usize) -> String {
    while text.len() > bytes_max {
        text.pop();
    }
    text
}
