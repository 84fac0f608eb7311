//! The metric families of the disk tier.

use super::page::{MetricsError, Page};
use crate::app::server::Server;
use fletch_store::{
    DiskState,
    disk::{Health, OffReason},
};

/// Returns the name of the disk tier's state, and an explanation unless it is `on`.
#[must_use]
pub fn disk_state(state: &DiskState) -> (&'static str, Option<String>) {
    match state {
        DiskState::Open(Health::On) => ("on", None),
        DiskState::Open(Health::Off { why, .. }) => (why.as_str(), Some(why.to_string())),
        DiskState::Absent(why) => ("absent", Some(why.clone())),
    }
}

/// Adds the families of the disk tier, which are 0 without a disk tier.
pub(super) fn families(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let report = server.store.disk().map(|d| d.report());
    let word = report.as_ref().map_or("none", |r| disk_state(&r.state).0);
    let words = ["none", "absent", "on"].into_iter().chain(OffReason::ALL.map(OffReason::as_str));
    page.gauge(
        "fletch_disk_state",
        "1 for the current state of the disk tier, 0 for all others",
        &["state"],
        &words.map(|w| (vec![w], u64::from(w == word))).collect::<Vec<_>>(),
    )?;
    let tier = report.as_ref().and_then(|r| r.engine.as_ref());
    let c = tier.map(|t| t.counts).unwrap_or_default();
    let of = |f: fn(&fletch_store::disk::DiskStats) -> u64| tier.map_or(0, f);
    let gauges = [
        ("fletch_disk_limit_bytes", "Bytes that the cache directory may occupy", of(|t| t.limit)),
        ("fletch_disk_capacity_bytes", "Bytes of the limit that chunks may occupy", of(|t| t.capacity)),
        ("fletch_disk_chunk_bytes", "Bytes that chunks occupy", of(|t| t.bytes)),
        ("fletch_disk_slab_bytes", "Bytes of the limit that slab files have taken", of(|t| t.slab_bytes)),
        ("fletch_disk_chunks", "Chunks on disk", of(|t| t.chunks)),
        ("fletch_disk_slabs", "Slab files", of(|t| t.slabs)),
        (
            "fletch_disk_index_bytes",
            "Bytes of memory that the index of the chunks on disk takes",
            of(|t| t.index_bytes),
        ),
        (
            "fletch_disk_append_queue_bytes",
            "Bytes of chunks that wait to be appended",
            report.as_ref().map_or(0, |r| r.queued_bytes),
        ),
    ];
    for (name, help, n) in gauges {
        page.gauge(name, help, &[], &[(vec![], n)])?;
    }
    let drops = report.as_ref().map_or((0, 0, 0), |r| (r.append_drops, r.append_dropped_bytes, r.late));
    let counters = [
        ("fletch_disk_put_chunks_total", "Chunks appended", c.puts),
        ("fletch_disk_put_bytes_total", "Bytes of chunks appended", c.put_bytes),
        (
            "fletch_disk_evicted_chunks_total",
            "Chunks evicted to make room, or because a share shrank",
            c.evicted,
        ),
        ("fletch_disk_evicted_bytes_total", "Bytes that evicted chunks occupied", c.evicted_bytes),
        ("fletch_disk_quarantined_total", "Damaged chunks, which are never served again", c.quarantined),
        ("fletch_disk_slabs_lost_total", "Slab files that disappeared", c.slabs_lost),
        ("fletch_disk_scrubbed_bytes_total", "Bytes read and hashed to find silent damage", c.scrubbed_bytes),
        ("fletch_disk_compacted_bytes_total", "Bytes copied to free space", c.compacted_bytes),
        (
            "fletch_disk_catalogue_rebuilds_total",
            "Times that an unreliable catalogue was discarded and started anew",
            c.catalogue_rebuilds,
        ),
        ("fletch_disk_errors_total", "Failed operations on files of the disk tier", c.errors),
        ("fletch_disk_turned_off_total", "Times that the disk tier was turned off", c.turned_off),
        (
            "fletch_disk_late_reads_total",
            "Disk reads that took too long, so that the reader passed the disk by",
            drops.2,
        ),
        ("fletch_disk_append_drops_total", "Chunks not appended because too many waited", drops.0),
        ("fletch_disk_append_dropped_bytes_total", "Bytes of chunks not appended for that reason", drops.1),
    ];
    for (name, help, n) in counters {
        page.counter(name, help, &[], &[(vec![], n)])?;
    }
    page.counter(
        "fletch_disk_refused_total",
        "Chunks that the disk tier did not keep, by the reason",
        &["why"],
        &[(vec!["share"], c.refused_share), (vec!["full"], c.refused_full)],
    )
}
