//! What the disk tier counted.

use super::page::{MetricsError, Page};
use crate::server::Server;
use fletch_store::{
    DiskState,
    disk::{Health, OffReason},
};

/// A word for the tier's state, and what it means unless it is `on`.
#[must_use]
pub fn disk_state(state: &DiskState) -> (&'static str, Option<String>) {
    match state {
        DiskState::Open(Health::On) => ("on", None),
        DiskState::Open(Health::Off { why, .. }) => (why.as_str(), Some(why.to_string())),
        DiskState::Absent(why) => ("absent", Some(why.clone())),
    }
}

/// The families of the tier; all zero where there is none.
pub(super) fn families(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let report = server.store.disk().map(|d| d.report());
    let word = report.as_ref().map_or("none", |r| disk_state(&r.state).0);
    let words = ["none", "absent", "on"].into_iter().chain(OffReason::ALL.map(OffReason::as_str));
    page.gauge(
        "fletch_disk_state",
        "1 for the state that the cache on disk is in",
        &["state"],
        &words.map(|w| (vec![w], u64::from(w == word))).collect::<Vec<_>>(),
    )?;
    let tier = report.as_ref().and_then(|r| r.engine.as_ref());
    let c = tier.map(|t| t.counts).unwrap_or_default();
    let of = |f: fn(&fletch_store::disk::DiskStats) -> u64| tier.map_or(0, f);
    let gauges = [
        ("fletch_disk_limit_bytes", "What the cache directory may occupy", of(|t| t.limit)),
        ("fletch_disk_capacity_bytes", "What chunks may occupy of that", of(|t| t.capacity)),
        ("fletch_disk_chunk_bytes", "What chunks occupy", of(|t| t.bytes)),
        ("fletch_disk_slab_bytes", "What slab files have taken of the limit", of(|t| t.slab_bytes)),
        ("fletch_disk_chunks", "Chunks on disk", of(|t| t.chunks)),
        ("fletch_disk_slabs", "Slab files", of(|t| t.slabs)),
        (
            "fletch_disk_index_bytes",
            "What the index of chunks on disk holds in memory",
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
            "Chunks that left to make room, or because a share shrank",
            c.evicted,
        ),
        ("fletch_disk_evicted_bytes_total", "What those occupied", c.evicted_bytes),
        ("fletch_disk_quarantined_total", "Chunks found damaged and never served again", c.quarantined),
        ("fletch_disk_slabs_lost_total", "Slab files that were gone", c.slabs_lost),
        ("fletch_disk_scrubbed_bytes_total", "Bytes read and hashed to find silent damage", c.scrubbed_bytes),
        ("fletch_disk_compacted_bytes_total", "Bytes copied to give space back", c.compacted_bytes),
        (
            "fletch_disk_catalogue_rebuilds_total",
            "Times the catalogue was doubted and begun anew",
            c.catalogue_rebuilds,
        ),
        ("fletch_disk_errors_total", "Operations on files of the cache that failed", c.errors),
        ("fletch_disk_turned_off_total", "Times the cache on disk was turned off", c.turned_off),
        ("fletch_disk_late_reads_total", "Reads of the disk that took too long and were passed by", drops.2),
        ("fletch_disk_append_drops_total", "Chunks dropped because too many waited to be appended", drops.0),
        ("fletch_disk_append_dropped_bytes_total", "Bytes of those", drops.1),
    ];
    for (name, help, n) in counters {
        page.counter(name, help, &[], &[(vec![], n)])?;
    }
    page.counter(
        "fletch_disk_refused_total",
        "Chunks that were about to be kept and were not, by why",
        &["why"],
        &[(vec!["share"], c.refused_share), (vec!["full"], c.refused_full)],
    )
}
