//! Declared jobs, epochs and sweeps.

use super::page::{MetricsError, Page};
use crate::server::Server;
use std::sync::atomic::Ordering::Relaxed;

/// Their families.
pub(super) fn families(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let stats = server.registry.stats();
    let (c, s) = (&server.registry.context.counts, &server.registry.context.sweep.counts);
    page.gauge("fletch_jobs_declared", "Jobs declared", &[], &[(vec![], stats.declared)])?;
    page.gauge(
        "fletch_jobs_open",
        "Of them, jobs that are in memory with their epochs",
        &[],
        &[(vec![], stats.open)],
    )?;
    page.gauge("fletch_epochs_open", "Epochs under way", &[], &[(vec![], stats.epochs_open)])?;
    page.counter(
        "fletch_epoch_entries_total",
        "Entries of epochs, by what happened to them",
        &["event"],
        &[
            (vec!["granted"], c.granted.load(Relaxed)),
            (vec!["acked"], c.acked.load(Relaxed)),
            (vec!["expired"], c.expired.load(Relaxed)),
        ],
    )?;
    page.counter(
        "fletch_epochs_finished_total",
        "Epochs that ended, by what their shuffle certificate says",
        &["shuffle"],
        &[(vec!["well"], c.well.load(Relaxed)), (vec!["poor"], c.poor.load(Relaxed))],
    )?;
    let pool = &server.registry.context.prefetch.pool;
    page.gauge(
        "fletch_prefetch_bytes",
        "Memory that holds what is fetched ahead of epochs in a known order, and what of it may be held",
        &["of"],
        &[(vec!["held"], server.store.stats().pinned_bytes), (vec!["max"], pool.total)],
    )?;
    page.gauge(
        "fletch_prefetch_epochs",
        "Epochs that are fetched for ahead of need",
        &[],
        &[(vec![], pool.takers())],
    )?;
    page.counter(
        "fletch_prefetch_fetched_bytes_total",
        "Bytes brought from origins ahead of need",
        &[],
        &[(vec![], pool.fetched_bytes.load(Relaxed))],
    )?;
    page.counter(
        "fletch_prefetch_unused_bytes_total",
        "Of those, bytes let go before anybody read them",
        &[],
        &[(vec![], pool.unused_bytes.load(Relaxed))],
    )?;
    let sum = |of: fn(&fletch_core::order::sweep::SweepProgress) -> u64| stats.sweeps.iter().map(of).sum();
    page.gauge("fletch_sweeps", "Sweeps", &[], &[(vec![], stats.sweeps.len() as u64)])?;
    page.gauge(
        "fletch_sweep_bytes",
        "What sweeps hold, and what they may hold, as it occupies the disk",
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
        "Samples that sweeps chose, by whether their bytes were here, or something else that was here was kept for later",
        &["unit"],
        &[
            (vec!["resident"], s.picked_resident.load(Relaxed)),
            (vec!["held_back"], s.picked_held_back.load(Relaxed)),
            (vec!["absent"], s.picked_absent.load(Relaxed)),
        ],
    )?;
    page.counter(
        "fletch_sweep_loaded_bytes_total",
        "Bytes that sweeps brought, as they occupy the disk",
        &[],
        &[(vec![], s.loaded_bytes.load(Relaxed))],
    )?;
    page.counter(
        "fletch_sweep_evicted_units_total",
        "Units that sweeps dropped",
        &[],
        &[(vec![], s.evicted.load(Relaxed))],
    )?;
    page.counter(
        "fletch_sweep_failed_units_total",
        "Units that did not come, or that the cache did not keep",
        &[],
        &[(vec![], s.failed.load(Relaxed))],
    )?;
    page.counter(
        "fletch_sweep_displaced_units_total",
        "Times that the disk kept less than a sweep's share, and something else left for a unit",
        &[],
        &[(vec![], s.displaced.load(Relaxed))],
    )
}
