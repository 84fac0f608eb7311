//! The metric families of jobs, epochs, prefetch and sweeps.

use super::page::{MetricsError, Page};
use crate::app::server::Server;
use std::sync::atomic::Ordering::Relaxed;

/// Adds the families.
pub(super) fn families(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let stats = server.registry.stats();
    let (c, s) = (&server.registry.context.counts, &server.registry.context.sweep.counts);
    page.gauge("fletch_jobs_declared", "Declared jobs", &[], &[(vec![], stats.declared)])?;
    page.gauge(
        "fletch_jobs_open",
        "Declared jobs that are in memory with their epochs",
        &[],
        &[(vec![], stats.open)],
    )?;
    page.gauge("fletch_epochs_open", "Running epochs", &[], &[(vec![], stats.epochs_open)])?;
    page.counter(
        "fletch_epoch_entries_total",
        "Plan entries: granted, acknowledged, or expired or released with their lease",
        &["event"],
        &[
            (vec!["granted"], c.granted.load(Relaxed)),
            (vec!["acked"], c.acked.load(Relaxed)),
            (vec!["expired"], c.expired.load(Relaxed)),
            (vec!["released"], c.released.load(Relaxed)),
        ],
    )?;
    page.counter(
        "fletch_epoch_faults_total",
        "Events by which an epoch may not deliver each sample exactly once",
        &["fault"],
        &[
            (vec!["late_ack"], c.late_acks.load(Relaxed)),
            (vec!["abandoned"], c.abandoned.load(Relaxed)),
            (vec!["damaged"], c.damaged.load(Relaxed)),
        ],
    )?;
    page.counter(
        "fletch_epochs_finished_total",
        "Finished epochs, by their shuffle certificate",
        &["shuffle"],
        &[(vec!["well"], c.well.load(Relaxed)), (vec!["poor"], c.poor.load(Relaxed))],
    )?;
    let pool = &server.registry.context.prefetch.pool;
    page.gauge(
        "fletch_prefetch_bytes",
        "Memory for prefetch of epochs in a known order: held now, and the most",
        &["of"],
        &[(vec!["held"], server.store.stats().pinned_bytes), (vec!["max"], pool.total)],
    )?;
    page.gauge(
        "fletch_prefetch_epochs",
        "Epochs that the server prefetches for",
        &[],
        &[(vec![], pool.takers())],
    )?;
    page.counter(
        "fletch_prefetch_fetched_bytes_total",
        "Bytes that prefetch read from origins",
        &[],
        &[(vec![], pool.fetched_bytes.load(Relaxed))],
    )?;
    page.counter(
        "fletch_prefetch_unused_bytes_total",
        "Prefetched bytes that were released unread",
        &[],
        &[(vec![], pool.unused_bytes.load(Relaxed))],
    )?;
    let sum = |of: fn(&fletch_core::order::sweep::SweepProgress) -> u64| stats.sweeps.iter().map(of).sum();
    page.gauge("fletch_sweeps", "Sweeps", &[], &[(vec![], stats.sweeps.len() as u64)])?;
    page.gauge(
        "fletch_sweep_bytes",
        "Bytes that sweeps hold and may hold, as they occupy the disk",
        &["of"],
        &[
            (vec!["window"], sum(|s| s.window_bytes)),
            (vec!["window_max"], sum(|s| s.window_bytes_max)),
            (vec!["reserve"], sum(|s| s.reserve_bytes)),
            (vec!["reserve_max"], sum(|s| s.reserve_bytes_max)),
        ],
    )?;
    page.counter(
        "fletch_sweep_picks_total",
        "Samples that sweeps picked: their unit was cached, absent, or absent while cached samples were held \
            back",
        &["unit"],
        &[
            (vec!["resident"], s.picked_resident.load(Relaxed)),
            (vec!["held_back"], s.picked_held_back.load(Relaxed)),
            (vec!["absent"], s.picked_absent.load(Relaxed)),
        ],
    )?;
    page.counter(
        "fletch_sweep_loaded_bytes_total",
        "Bytes that sweeps loaded, as they occupy the disk",
        &[],
        &[(vec![], s.loaded_bytes.load(Relaxed))],
    )?;
    page.counter(
        "fletch_sweep_evicted_units_total",
        "Units that sweeps evicted",
        &[],
        &[(vec![], s.evicted.load(Relaxed))],
    )?;
    page.counter(
        "fletch_sweep_failed_units_total",
        "Units that could not be loaded, or that the cache did not keep",
        &[],
        &[(vec![], s.failed.load(Relaxed))],
    )?;
    page.counter(
        "fletch_sweep_displaced_units_total",
        "Times that the disk kept less than a sweep's share, and evicted another unit for a new one",
        &[],
        &[(vec![], s.displaced.load(Relaxed))],
    )
}
