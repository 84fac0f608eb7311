//! The metric families of open jobs: how far each is, what it waits for, and what would bound it.

use super::page::{MetricsError, Page};
use crate::{app::server::Server, tenancy::accounting::LABELS_MAX};

/// The most ranks of a job that have a series.
const RANKS_MAX: usize = 64;
/// The most jobs whose ranks have series.
const JOBS_WITH_RANKS_MAX: usize = 100;
const JOB: [&str; 2] = ["tenant", "train_job"];

/// Adds the families.
pub(super) fn families(page: &Page, server: &Server) -> Result<(), MetricsError> {
    progress(page, server)?;
    measurements(page, server)
}

fn progress(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let jobs = server.registry.progress(LABELS_MAX, RANKS_MAX);
    let rows = jobs.iter().map(|job| {
        (vec![job.tenant.as_str(), job.name.as_str(), job.dataset.as_str(), job.order.as_str()], 1)
    });
    page.gauge(
        "fletch_job_info",
        "1 for an open job, with the dataset that it reads and the order of its epochs",
        &["tenant", "train_job", "dataset", "order"],
        &rows.collect::<Vec<_>>(),
    )?;
    let epochs: Vec<_> = jobs
        .iter()
        .filter_map(|job| Some((vec![job.tenant.as_str(), job.name.as_str()], job.epoch.as_ref()?)))
        .collect();
    let rows: Vec<_> = epochs.iter().map(|(job, (epoch, _))| (job.clone(), epoch.epoch)).collect();
    page.gauge("fletch_job_epoch", "The number of the latest epoch of an open job, from 0", &JOB, &rows)?;
    let rows = epochs.iter().flat_map(|(job, (epoch, _))| {
        let of = |of| vec![job[0], job[1], of];
        [(of("planned"), epoch.planned), (of("acked"), epoch.acked), (of("held"), epoch.held)]
    });
    page.gauge(
        "fletch_job_epoch_entries",
        "Plan entries of the latest epoch: planned, acknowledged, and held in leases",
        &["tenant", "train_job", "of"],
        &rows.collect::<Vec<_>>(),
    )?;
    let ranks: Vec<String> = (0..RANKS_MAX).map(|rank| rank.to_string()).collect();
    let rows = epochs.iter().take(JOBS_WITH_RANKS_MAX).flat_map(|(job, (_, left))| {
        let of_rank = ranks.iter().zip(left);
        of_rank.map(|(rank, left)| (vec![job[0], job[1], rank.as_str()], *left))
    });
    page.gauge(
        "fletch_job_rank_entries_left",
        "Plan entries of the latest epoch that a rank has still to acknowledge",
        &["tenant", "train_job", "rank"],
        &rows.collect::<Vec<_>>(),
    )
}

fn measurements(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let division = server.allocator.current();
    let measured: Vec<_> =
        division.readers.iter().filter_map(|r| Some((r, r.measured?))).take(LABELS_MAX).collect();
    let rows = measured.iter().flat_map(|(r, m)| {
        let of = |of| vec![r.tenant.as_str(), r.name.as_str(), of];
        let rates = [
            ("now", Some(m.rate)),
            ("never_waiting", Some(m.most_rate)),
            ("origin", m.origin_rate),
            ("disk", m.disk_rate),
        ];
        rates.into_iter().filter_map(move |(word, rate)| Some((of(word), rate?)))
    });
    page.ratio(
        "fletch_job_samples_per_second",
        "Rates of a job, by the last decision: now, if it never waited, and what origin and disk give",
        &["tenant", "train_job", "of"],
        &rows.collect::<Vec<_>>(),
    )?;
    let rows = measured.iter().flat_map(|(r, m)| {
        let of = |part| vec![r.tenant.as_str(), r.name.as_str(), part];
        let [compute, preparation, fetch] = m.parts;
        [(of("compute"), compute), (of("preparation"), preparation), (of("fetch"), fetch)]
    });
    page.ratio(
        "fletch_job_time_ratio",
        "Parts of the time in which a job computes, prepares batches or waits, by the last decision",
        &["tenant", "train_job", "part"],
        &rows.collect::<Vec<_>>(),
    )?;
    let rows = measured.iter().map(|(r, m)| (vec![r.tenant.as_str(), r.name.as_str()], m.cached));
    page.ratio(
        "fletch_job_cached_ratio",
        "The part of a job's bytes that the server did not read from the origin for it, by the last decision",
        &JOB,
        &rows.collect::<Vec<_>>(),
    )
}
