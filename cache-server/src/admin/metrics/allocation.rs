//! The metric families of the division of the disk, and of what running jobs wait for.

use super::{
    DATASETS_MAX,
    page::{MetricsError, Page},
};
use crate::{app::server::Server, tenancy::accounting::LABELS_MAX};
use fletch_api::benefit::BenefitVerdict;
use std::collections::BTreeMap;

const VERDICTS: [(BenefitVerdict, &str); 5] = [
    (BenefitVerdict::Compute, "compute"),
    (BenefitVerdict::Preparation, "preparation"),
    (BenefitVerdict::Origin, "origin"),
    (BenefitVerdict::Disk, "disk"),
    (BenefitVerdict::Queue, "queue"),
];

/// Adds the families.
pub(super) fn families(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let division = server.allocator.current();
    let (mut limited, capacity) = server.allocator.claims();
    if server.divided_capacity().is_none() {
        limited.clear();
    }
    let (by_reads, names) = (division.by_reads(&limited, capacity), server.share_names());
    // By dataset: what its sweeps and its plain readers may occupy, and what both would by reads alone.
    let mut datasets: BTreeMap<String, (u64, u64, u64)> = BTreeMap::new();
    for claim in division.claims(&limited, capacity) {
        let Some((_, dataset)) = names.get(&claim.pool.plain) else { continue };
        let (sweeps, plain, reads) = datasets.entry(dataset.to_string()).or_default();
        let disk = server.store.disk().and_then(|disk| disk.part_of(claim.dataset));
        *if claim.dataset == claim.pool.plain { plain } else { sweeps } += disk.or(claim.want).unwrap_or(0);
        *reads += by_reads.get(&claim.dataset).copied().unwrap_or(0);
    }
    let mut rows: Vec<_> = datasets.iter().collect();
    // The largest come first, and are named even where there are too many datasets.
    rows.sort_by_key(|(_, (sweeps, plain, _))| std::cmp::Reverse(sweeps.saturating_add(*plain)));
    rows.truncate(DATASETS_MAX);
    let rows: Vec<_> = rows
        .into_iter()
        .flat_map(|(dataset, &(sweeps, plain, reads))| {
            let name = |of| vec![dataset.as_str(), of];
            [
                (name("share"), sweeps.saturating_add(plain)),
                (name("sweep"), sweeps),
                (name("plain"), plain),
                (name("by_reads"), reads),
            ]
        })
        .collect();
    page.gauge(
        "fletch_share_bytes",
        "Bytes of disk that a dataset may occupy: all, those of its sweeps and of its plain readers, and \
         what it would have in a division by reads alone",
        &["dataset", "of"],
        &rows,
    )?;
    page.gauge(
        "fletch_allocation_divided_bytes",
        "Bytes of disk that are divided by what they are worth to measured jobs",
        &[],
        &[(vec![], division.divided)],
    )?;
    page.counter(
        "fletch_allocation_moved_bytes_total",
        "Bytes that decisions about the disk took away from datasets",
        &[],
        &[(vec![], division.moved)],
    )?;
    let measured = division.readers.iter().filter_map(|r| Some((r, r.measured?))).take(LABELS_MAX);
    let measured: Vec<_> = measured.collect();
    let speeds: Vec<_> = measured
        .iter()
        .map(|(r, m)| (vec![r.tenant.as_str(), r.name.as_str()], (m.rate / m.most_rate).clamp(0.0, 1.0)))
        .collect();
    page.ratio(
        "fletch_job_speed_ratio",
        "The rate of a job, as a part of its rate if it never waited, by the last decision",
        &["tenant", "train_job"],
        &speeds,
    )?;
    let waits = measured.iter().flat_map(|(r, m)| {
        let labels = |verdict| vec![r.tenant.as_str(), r.name.as_str(), verdict];
        VERDICTS.map(|(verdict, name)| (labels(name), u64::from(m.verdict == verdict)))
    });
    page.gauge(
        "fletch_job_waits_for",
        "1 for what a job waits for most, by the last decision about the disk",
        &["tenant", "train_job", "verdict"],
        &waits.collect::<Vec<_>>(),
    )
}
