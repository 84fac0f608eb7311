//! The metric families of what jobs and datasets cost, and of the origins' conditions.

use super::{
    DATASETS_MAX,
    page::{MetricsError, Page},
};
use crate::app::server::Server;
use std::{collections::BTreeMap, time::UNIX_EPOCH};

/// Adds the families.
pub(super) fn families(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let costs = server.accounts.costs.rows();
    let mut rows = Vec::new();
    for row in &costs {
        let labels = |of| vec![row.of.tenant.as_str(), &*row.label, row.of.dataset.as_str(), of];
        for (of, bytes) in [("content", row.content), ("tables", row.tables)] {
            if bytes > 0 {
                rows.push((labels(of), bytes));
            }
        }
    }
    page.counter(
        "fletch_origin_read_bytes_total",
        "Bytes read from origins, by the job and the dataset that needed them",
        &["tenant", "train_job", "dataset", "of"],
        &rows,
    )?;
    let stalled = costs.iter().filter(|row| !row.stalled.is_zero()).map(|row| {
        (vec![row.of.tenant.as_str(), &*row.label, row.of.dataset.as_str()], row.stalled.as_secs_f64())
    });
    page.seconds(
        "fletch_stall_seconds_total",
        "Time in which at least one reply of the job waited for bytes",
        &["tenant", "train_job", "dataset"],
        &stalled.collect::<Vec<_>>(),
    )?;
    let mut avoided: BTreeMap<String, u64> = BTreeMap::new();
    for ((_, dataset), bytes) in server.accounts.costs.avoided_since_start() {
        *avoided.entry(dataset.to_string()).or_default() += bytes;
    }
    let rows: Vec<_> = avoided.iter().map(|(dataset, n)| (vec![dataset.as_str()], *n)).collect();
    page.counter(
        "fletch_avoided_bytes_total",
        "Bytes delivered beyond those that were read from the dataset's origins",
        &["dataset"],
        &rows,
    )?;
    sizes(page, server)?;
    conditions(page, server)
}

fn sizes(page: &Page, server: &Server) -> Result<(), MetricsError> {
    // By dataset: the content of its version, what its chunks would occupy, and what they occupy.
    let mut datasets: BTreeMap<String, [Option<u64>; 3]> = BTreeMap::new();
    for used in server.dataset_uses(|_| true) {
        let row = datasets.entry(used.dataset.to_string()).or_default();
        for (sum, n) in row.iter_mut().zip([used.version_bytes, used.layout_bytes, used.cached_bytes]) {
            *sum = match (*sum, n) {
                (Some(sum), Some(n)) => Some(sum + n),
                (sum, n) => sum.or(n),
            };
        }
    }
    let mut rows: Vec<_> = datasets.iter().collect();
    // The largest in the cache come first, and are named even where there are too many datasets.
    rows.sort_by_key(|(_, [_, _, cached])| std::cmp::Reverse(*cached));
    let rows = rows.into_iter().take(DATASETS_MAX).flat_map(|(dataset, bytes)| {
        let words = ["version", "layout", "cached"];
        words.into_iter().zip(bytes).filter_map(|(of, n)| Some((vec![dataset.as_str(), of], (*n)?)))
    });
    page.gauge(
        "fletch_dataset_bytes",
        "Bytes of a dataset: content of its version, what all its chunks occupy on disk, and what is cached",
        &["dataset", "of"],
        &rows.collect::<Vec<_>>(),
    )
}

fn conditions(page: &Page, server: &Server) -> Result<(), MetricsError> {
    // By dataset: whether an origin of it fails, and when a call to one failed last.
    let mut datasets: BTreeMap<String, (bool, u64, u64)> = BTreeMap::new();
    for origin in server.versions.conditions() {
        let at = origin.condition.last_error.map(|e| e.at.duration_since(UNIX_EPOCH).unwrap_or_default());
        for dataset in origin.datasets {
            let (failing, last, failed) = datasets.entry(dataset.to_string()).or_default();
            *failing |= origin.condition.failing;
            *last = (*last).max(at.map_or(0, |at| at.as_secs()));
            *failed += origin.condition.failed;
        }
    }
    let mut rows: Vec<_> = datasets.iter().collect();
    // Those that fail come first, and are named even where there are too many datasets.
    rows.sort_by_key(|(name, (failing, ..))| (!failing, *name));
    rows.truncate(DATASETS_MAX);
    let of = |n: fn(&(bool, u64, u64)) -> u64| {
        rows.iter().map(|(name, row)| (vec![name.as_str()], n(row))).collect::<Vec<_>>()
    };
    page.gauge(
        "fletch_origin_failing",
        "1 while an origin of the dataset fails: the last call failed, or has no answer",
        &["dataset"],
        &of(|row| row.0.into()),
    )?;
    page.counter(
        "fletch_origin_calls_failed_total",
        "Calls to the dataset's origins that failed",
        &["dataset"],
        &of(|row| row.2),
    )?;
    page.gauge(
        "fletch_origin_last_error_timestamp_seconds",
        "When a call to an origin of the dataset failed last, in seconds since 1970; 0 if none did",
        &["dataset"],
        &of(|row| row.1),
    )
}
