//! The state of a server for people: what `fletch status` and `fletch top` print. Pure: a snapshot of the
//! server's answers in, text out.
//!
//! `status` and `top` show the same tables ([`tables`]), so a column that is added there is in both.

pub mod snapshot;
pub mod tables;
pub mod text_table;

pub use snapshot::{CredentialRow, MountRow, Snapshot};

use crate::out::count;
use fletch_api::{AllocationReason, DatasetUse};
use fletch_settings::Span;
use serde::Serialize;
use std::{fmt::Write as _, time::Duration};
use text_table::TextTable;

/// The most rows of each table: the output is one screen.
const ROWS_MAX: usize = 12;
/// The most reasons of a bad health.
const REASONS_MAX: usize = 6;

/// Whether the server does its work, and why not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Health {
    /// `ok` or `degraded`.
    pub state: &'static str,
    /// What is wrong. Empty if nothing is.
    pub reasons: Vec<String>,
}

/// Returns the health of a server.
#[must_use]
pub fn health(now: &Snapshot) -> Health {
    let mut reasons = Vec::new();
    if let Some(disk) = now.info.disk.as_ref().filter(|d| d.state != "on") {
        let detail = disk.detail.as_ref().map(|d| format!(" ({d})")).unwrap_or_default();
        reasons.push(format!("the disk cache is {}{detail}", disk.state));
    }
    let failing = now.failing();
    if !failing.is_empty() {
        let names: Vec<&str> = failing.iter().map(|o| o.uri.as_str()).take(3).collect();
        let more = failing.len().saturating_sub(names.len());
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let verb = if failing.len() == 1 { "fails" } else { "fail" };
        reasons.push(format!("{}{more} {verb}", names.join(", ")));
    }
    for mount in now.mounts.iter().filter(|m| m.dead) {
        reasons.push(format!("the mount at {} is dead", mount.dir));
    }
    for job in &now.jobs {
        if let Some(why) = job.sweep.as_ref().and_then(|sweep| sweep.warning()) {
            reasons.push(format!("job {}: {why}", job.name));
        }
    }
    Health { state: if reasons.is_empty() { "ok" } else { "degraded" }, reasons }
}

/// Returns a sentence for each dataset with changed objects. Their files fail; the origin works.
#[must_use]
pub fn changed_objects(now: &Snapshot) -> Vec<String> {
    let changed = now.accounts.datasets.iter().filter(|d| d.changed_objects > 0);
    let sentence = |d: &DatasetUse| {
        format!(
            "{} changed since the index: `fletch refresh {}`",
            count(d.changed_objects, "object"),
            d.dataset
        )
    };
    changed.map(sentence).collect()
}

/// Formats bytes for people.
#[must_use]
pub fn size(n: u64) -> String {
    crate::out::bytes(n)
}

/// Formats a duration with its two largest units: `3d 4h`, `12m 5s`, `4s`.
#[must_use]
pub fn span(d: Duration) -> String {
    let text = Span(Duration::from_secs(d.as_secs())).to_string();
    text.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

/// Formats a part of a whole as a percentage. `-` for a part of nothing.
#[must_use]
pub fn percent(part: u64, whole: u64) -> String {
    match (u128::from(part) * 1000).checked_div(u128::from(whole)) {
        None => "-".to_owned(),
        Some(tenths) if tenths >= 1000 => format!("{} %", tenths / 10),
        Some(tenths) => format!("{}.{} %", tenths / 10, tenths % 10),
    }
}

/// Returns one screen. `before` is an earlier snapshot, for rates.
#[must_use]
pub fn screen(before: Option<&Snapshot>, now: &Snapshot) -> String {
    let mut out = String::new();
    head(&mut out, now);
    section(&mut out, "datasets", &tables::datasets(now));
    section(&mut out, "drafts", &tables::drafts(now));
    section(&mut out, "jobs", &tables::jobs(before, now));
    section(&mut out, "shares of the disk", &tables::shares(now));
    section(&mut out, "mounts", &tables::mounts(now));
    section(&mut out, "failing origins", &tables::failing_origins(now));
    section(&mut out, "last errors of origins that work", &tables::past_errors(now));
    section(&mut out, "credentials", &tables::credentials(now));
    out
}

/// Writes the lines about the whole server.
fn head(out: &mut String, now: &Snapshot) {
    let (info, health) = (&now.info, health(now));
    let uptime = span(Duration::from_secs(info.uptime_s));
    let (name, version, state) = (&info.name, &info.version, health.state);
    let _infallible = writeln!(out, "{name} {version} at {}, up {uptime}: {state}", now.server);
    if !now.cluster.is_empty() {
        let servers = now.cluster.join(", ");
        let _infallible = writeln!(out, "member of a cluster: {servers}");
    }
    for why in health.reasons.iter().take(REASONS_MAX) {
        let _infallible = writeln!(out, "why    {why}");
    }
    if let Some(door) = &info.s3 {
        let scheme = if door.tls { "https" } else { "http" };
        let (listen, bucket) = (&door.listen, &door.bucket);
        let _infallible = writeln!(out, "s3     {scheme}://{listen}, bucket {bucket}");
    }
    for line in changed_objects(now).iter().take(REASONS_MAX) {
        let _infallible = writeln!(out, "note   {line}");
    }
    match &info.disk {
        None => out.push_str("disk   none; the cache is memory only\n"),
        Some(disk) => {
            let of = disk.capacity_bytes.map_or_else(String::new, |all| {
                format!(" of {} ({})", size(all), percent(disk.chunk_bytes, all))
            });
            let chunks = count(disk.chunks, "chunk");
            let _infallible =
                writeln!(out, "disk   {}{of} in {chunks}, policy {}", size(disk.chunk_bytes), disk.policy);
            let (allocation, ago) = (&now.allocation, now.allocation.age_s);
            let decided = allocation.reason.filter(|reason| *reason != AllocationReason::NotMeasured);
            if let (Some(reason), Some(ago)) = (decided, ago) {
                let ago = span(Duration::from_secs_f64(ago.clamp(0.0, 1e9)));
                let _infallible = writeln!(out, "shares last decision {ago} ago: {}", reason.words());
            }
        }
    }
}

/// Adds a table under its title, and says how many rows are left out.
fn section(out: &mut String, title: &str, table: &TextTable) {
    if table.is_empty() {
        return;
    }
    let _infallible = write!(out, "\n{title}\n{}", table.render(ROWS_MAX));
}

#[cfg(test)]
mod tests;
