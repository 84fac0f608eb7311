//! The datasets of the admin page.

use super::Viewer;
use crate::{app::server::Server, data::versions::OriginCondition, training::benefit::ServiceSums};
use fletch_api::{
    Mount,
    dashboard::{DashboardDataset, DashboardJob, DashboardVersion, JobState},
};
use fletch_core::{DatasetName, Domain, Root, TagName};
use fletch_store::DatasetId;
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
};

/// A dataset, with its domain.
type Name = (Domain, DatasetName);

/// The requests to the origins of each dataset, and which datasets have an origin that fails.
#[derive(Debug, Default)]
pub(super) struct OriginReads {
    reads: BTreeMap<Name, ServiceSums>,
    failing: BTreeSet<Name>,
}

impl OriginReads {
    /// `before` are the requests before the server's latest start.
    pub fn of(conditions: &[OriginCondition], before: BTreeMap<Name, ServiceSums>) -> Self {
        let mut reads = OriginReads { reads: before, failing: BTreeSet::new() };
        for origin in conditions {
            for dataset in &origin.datasets {
                let name = (origin.domain.clone(), dataset.clone());
                let sums = reads.reads.entry(name.clone()).or_default();
                sums.requests += origin.reads.requests;
                sums.bytes += origin.reads.bytes;
                if origin.condition.failing {
                    reads.failing.insert(name);
                }
            }
        }
        reads
    }

    pub fn is_failing(&self, name: &Name) -> bool {
        self.failing.contains(name)
    }

    /// Returns the requests that would have brought `bytes`, at the mean size of those that were sent.
    fn requests_for(&self, name: &Name, bytes: u64) -> Option<u64> {
        let sent = self.reads.get(name).copied().filter(|sent| sent.bytes > 0)?;
        Some((bytes as f64 * sent.requests as f64 / sent.bytes as f64).round() as u64)
    }

    /// Returns the requests of each dataset.
    pub fn sums(&self) -> &BTreeMap<Name, ServiceSums> {
        &self.reads
    }
}

/// Returns the datasets that a caller may see, those that occupy most first.
pub(super) fn dataset_rows(
    server: &Server,
    viewer: &Viewer,
    reads: &OriginReads,
    jobs: &[DashboardJob],
) -> Vec<DashboardDataset> {
    // By the dataset of plain readers: its share and those of its sweeps.
    let mut shares: HashMap<DatasetId, u64> = HashMap::new();
    let tier = server.store.disk().and_then(|disk| disk.engine()).map(|tier| tier.stats());
    for usage in tier.iter().flat_map(|tier| &tier.datasets) {
        if let Some(share) = usage.share {
            *shares.entry(usage.plain).or_default() += share;
        }
    }
    let mut readers: HashMap<Name, u64> = HashMap::new();
    for job in jobs.iter().filter(|j| j.doing.state != JobState::Idle) {
        *readers.entry((job.domain.clone(), job.dataset.clone())).or_default() += 1;
    }
    let registered = server.registrations.all();
    let uris: HashMap<Name, &str> = registered
        .iter()
        .map(|r| ((r.domain.clone(), r.dataset.name.clone()), r.dataset.uri.as_str()))
        .collect();
    let row = |usage: fletch_api::DatasetUse| {
        let name = (usage.domain.clone(), usage.dataset.clone());
        DashboardDataset {
            uri: uris.get(&name).map(|uri| (*uri).to_owned()).unwrap_or_default(),
            share_bytes: shares.get(&DatasetId::of(&name.0, &name.1)).copied(),
            jobs: readers.get(&name).copied().unwrap_or(0),
            is_failing: reads.is_failing(&name),
            avoided_requests: reads.requests_for(&name, usage.avoided_bytes),
            usage,
        }
    };
    let mut rows: Vec<_> =
        server.dataset_uses(|domain| viewer.sees_domain(domain)).into_iter().map(row).collect();
    rows.sort_by_key(|d| (!d.is_failing, Reverse(d.usage.cached_bytes), Reverse(d.usage.delivered_bytes)));
    rows
}

/// Returns the row of one dataset, if the caller may see it, and the jobs that read it.
#[must_use]
pub fn dataset_row(
    server: &Server,
    viewer: &Viewer,
    (domain, dataset): (&Domain, &DatasetName),
) -> Option<(DashboardDataset, Vec<DashboardJob>)> {
    let reads = super::origin_reads(server);
    let mut jobs = super::jobs_of(server, viewer);
    jobs.retain(|j| j.domain == *domain && j.dataset == *dataset);
    let rows = dataset_rows(server, viewer, &reads, &jobs);
    let row = rows.into_iter().find(|d| d.usage.domain == *domain && d.usage.dataset == *dataset)?;
    Some((row, jobs))
}

/// Returns the versions of a dataset that the server knows: those of tags, jobs, mounts and open tables.
#[must_use]
pub fn known_versions(
    server: &Server,
    viewer: &Viewer,
    (domain, dataset): (&Domain, &DatasetName),
    tags: Vec<(TagName, Root)>,
    mounts: &[Mount],
) -> Vec<DashboardVersion> {
    let mut versions: BTreeMap<Root, DashboardVersion> = BTreeMap::new();
    let empty = |root| DashboardVersion {
        root,
        tags: Vec::new(),
        bytes: None,
        files: None,
        entries: None,
        created_ns: None,
        draft: None,
        jobs: 0,
        mounts: 0,
    };
    for (root, opened) in server.versions.opened(domain, dataset) {
        let version = versions.entry(root).or_insert_with(|| empty(root));
        version.bytes = Some(opened.shown.bytes);
        version.files = Some(opened.shown.files);
        version.entries = Some(opened.entries);
        version.created_ns = Some(opened.created_ns);
    }
    for draft in server.seals.drafts(domain).into_iter().filter(|draft| draft.dataset == *dataset) {
        let root = draft.root;
        versions.entry(root).or_insert_with(|| empty(root)).draft = Some(draft);
    }
    for (tag, root) in tags {
        versions.entry(root).or_insert_with(|| empty(root)).tags.push(tag);
    }
    for (of, tenant, job) in server.registry.all() {
        if of == *domain && job.dataset == *dataset && viewer.sees_tenant(&of, &tenant) {
            versions.entry(job.root).or_insert_with(|| empty(job.root)).jobs += 1;
        }
    }
    for mount in mounts {
        let root = mount.announced.root;
        versions.entry(root).or_insert_with(|| empty(root)).mounts += 1;
    }
    let mut versions: Vec<_> = versions.into_values().collect();
    versions.sort_by_key(|v| (v.tags.is_empty(), Reverse(v.created_ns)));
    versions
}
