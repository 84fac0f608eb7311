//! `GET /metrics`: writes what the rooms count, in Prometheus' text format (`docs/METRICS.md`).
//!
//! Counters live where things happen. This room only reads them.

mod allocation;
mod costs;
mod disk;
mod drafts;
mod epochs;
mod jobs;
mod page;
mod tenants;

pub use disk::disk_state;

use crate::{
    app::{server::Server, tls::Tls},
    data::versions::BreakerState,
};
use fletch_core::DatasetName;
use page::{MetricsError, Page};
use prometheus::{Encoder as _, TextEncoder};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

/// Returns the page.
///
/// # Errors
/// If a name or label breaks Prometheus' rules, which the names written here do not.
pub fn render(server: &Server) -> Result<Vec<u8>, MetricsError> {
    let page = Page::default();
    bytes(&page, server)?;
    store(&page, server)?;
    disk::families(&page, server)?;
    epochs::families(&page, server)?;
    jobs::families(&page, server)?;
    tenants::families(&page, server)?;
    costs::families(&page, server)?;
    allocation::families(&page, server)?;
    origins(&page, server)?;
    homes(&page, server)?;
    cluster(&page, server)?;
    peers(&page, server)?;
    process(&page, server)?;
    let mut families = server.requests.gather();
    families.extend(server.read_watch.gather());
    families.extend(page.gather());
    let mut out = Vec::new();
    TextEncoder::new().encode(&families, &mut out)?;
    Ok(out)
}

fn bytes(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let rows = server.accounts.rows();
    let rows: Vec<_> = rows
        .iter()
        .map(|(r, n)| {
            let labels = vec![
                r.tenant.as_str(),
                &*r.job,
                r.dataset.as_str(),
                r.component,
                r.tier.as_str(),
                r.result.as_str(),
            ];
            (labels, *n)
        })
        .collect();
    page.counter(
        "fletch_bytes_total",
        "Content bytes handed to connections",
        &["tenant", "train_job", "dataset", "component", "tier", "result"],
        &rows,
    )?;
    page.counter(
        "fletch_table_bytes_total",
        "Bytes of version tables handed to connections",
        &[],
        &[(vec![], server.accounts.table_bytes())],
    )
}

fn store(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let fetched_from_peers = server.cluster.peers().map_or(0, |peers| peers.sums()[3]);
    let s = server.store.stats();
    page.counter(
        "fletch_chunk_reads_total",
        "Reads of chunks, by the tier that had them",
        &["tier"],
        &[
            (vec!["memory"], s.hits_memory),
            (vec!["disk"], s.hits_disk),
            (vec!["flight"], s.hits_flight),
            // Each answer of a peer with bytes was one call of a fetch.
            (vec!["origin"], s.fetches.saturating_sub(fetched_from_peers)),
            (vec!["peer"], fetched_from_peers),
        ],
    )?;
    page.counter(
        "fletch_chunk_fetch_errors_total",
        "Fetches of chunks that failed",
        &[],
        &[(vec![], s.fetch_errors)],
    )?;
    page.counter(
        "fletch_chunk_fetched_bytes_total",
        "Bytes of chunks that were fetched and hashed to their names",
        &[],
        &[(vec![], s.fetched_bytes)],
    )?;
    page.counter(
        "fletch_overloaded_total",
        "Reads rejected because no memory became free in time",
        &[],
        &[(vec![], s.overloaded)],
    )?;
    page.counter("fletch_deadline_total", "Fetches that did not end in time", &[], &[(vec![], s.deadlines)])?;
    let w = &server.versions.corruption;
    page.counter(
        "fletch_corrupt_total",
        "Wrong bytes that were noticed and not delivered, by their source",
        &["source"],
        &[
            (vec!["hash"], s.corrupt),
            (vec!["disk"], server.store.disk().map_or(0, |d| d.report().damaged())),
            (vec!["origin_changed"], w.changed.load(Relaxed)),
            (vec!["origin_corrupt"], w.corrupt.load(Relaxed)),
            (vec!["origin_missing"], w.missing.load(Relaxed)),
            (vec!["tables"], w.tables.load(Relaxed)),
        ],
    )?;
    let (parts, blocks) = server.versions.table_memory();
    page.gauge(
        "fletch_memory_bytes",
        "Bytes in memory: `live` of all chunk buffers; `cached` those of them in the cache; `copies` of \
         parts of chunks, for sending; `read_ahead` of data read ahead of being sent; `parts` and \
         `blocks` of version tables",
        &["of"],
        &[
            (vec!["live"], s.live_bytes),
            (vec!["cached"], s.cached_bytes),
            (vec!["copies"], server.read_ahead.copies.taken() + server.read_ahead.framing.taken()),
            (vec!["read_ahead"], server.read_ahead.reserved_bytes()),
            (vec!["parts"], parts),
            (vec!["blocks"], blocks),
        ],
    )?;
    let local = server.versions.local_tables();
    page.counter(
        "fletch_local_table_files_total",
        "Files of local tables: `written`; `damaged`, found and made again; `refused` by a full disk",
        &["event"],
        &[
            (vec!["written"], local.written),
            (vec!["damaged"], local.damaged),
            (vec!["refused"], local.refused),
        ],
    )?;
    page.gauge(
        "fletch_local_table_bytes",
        "Bytes of local tables in the cache directory",
        &[],
        &[(vec![], local.bytes)],
    )?;
    page.gauge(
        "fletch_memory_limit_bytes",
        "Limit of `live`",
        &[],
        &[(vec![], server.limits.store_bytes())],
    )?;
    page.gauge("fletch_cached_chunks", "Chunks in the memory cache", &[], &[(vec![], s.cached_chunks)])?;
    page.gauge("fletch_flights", "Running fetches", &[], &[(vec![], s.flights)])
}

/// The most datasets that one family names.
const DATASETS_MAX: usize = 1000;

fn homes(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let mut states: Vec<_> = server.versions.dataset_states().into_iter().collect();
    // Those that do not answer come first, and are named even where there are too many datasets.
    states.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let open = states.iter().filter(|(_, state)| *state != BreakerState::Closed).count();
    let rows = states.iter().take(DATASETS_MAX);
    let rows: Vec<_> = rows.map(|(name, state)| (vec![name.as_str()], *state as u64)).collect();
    page.gauge(
        "fletch_origin_breaker_state",
        "Whether a dataset's origin answers: 0 it does, 1 the server probes it, 2 the server leaves it alone",
        &["dataset"],
        &rows,
    )?;
    page.gauge(
        "fletch_origin_breakers_open",
        "Datasets whose origin does not answer",
        &[],
        &[(vec![], open as u64)],
    )?;
    let mut changed: BTreeMap<DatasetName, u64> = BTreeMap::new();
    for ((_, name), objects) in server.versions.changed_objects().counts() {
        *changed.entry(name).or_default() += objects;
    }
    let mut names: Vec<_> = states.iter().map(|(name, _)| name).collect();
    // Those with changed objects are named even where there are too many datasets.
    names.sort_by_key(|name| !changed.contains_key(*name));
    let rows = names.into_iter().take(DATASETS_MAX);
    let rows: Vec<_> =
        rows.map(|name| (vec![name.as_str()], changed.get(name).copied().unwrap_or(0))).collect();
    page.gauge(
        "fletch_dataset_changed_objects",
        "Objects of a dataset that changed since the index, as far as readers met them",
        &["dataset"],
        &rows,
    )?;
    let counts = server.versions.home_counts();
    page.counter(
        "fletch_origin_breaker_opened_total",
        "Times that an origin stopped answering and the server began to leave it alone",
        &[],
        &[(vec![], counts.opened.load(Relaxed))],
    )?;
    page.counter(
        "fletch_origin_hedged_total",
        "Reads that asked a second origin while the first still might answer",
        &[],
        &[(vec![], counts.hedged.load(Relaxed))],
    )
}

fn origins(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let o = server.versions.origins().stats();
    page.counter(
        "fletch_origin_requests_total",
        "Calls to origins, tables included",
        &[],
        &[(vec![], o.requests)],
    )?;
    page.counter("fletch_origin_retries_total", "Attempts after the first", &[], &[(vec![], o.retries)])?;
    page.counter(
        "fletch_origin_pauses_total",
        "Times that an origin asked to slow down and the server paused",
        &[],
        &[(vec![], o.pauses)],
    )?;
    page.counter(
        "fletch_origin_credentials_read_total",
        "Times that changed credentials were read again",
        &[],
        &[(vec![], o.credentials_read)],
    )?;
    page.counter(
        "fletch_origin_errors_total",
        "Calls to origins that failed",
        &["error"],
        &[
            (vec!["not_found"], o.not_found),
            (vec!["changed"], o.changed),
            (vec!["denied"], o.denied),
            (vec!["invalid"], o.invalid),
            (vec!["throttled"], o.throttled),
            (vec!["unavailable"], o.unavailable),
            (vec!["wrong_answer"], o.wrong_answer),
        ],
    )
}

fn cluster(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let (stats, view) = (server.cluster.stats(), server.cluster.view());
    page.gauge(
        "fletch_cluster_coordinator_up",
        "Whether the last contact with the coordinator of the cluster succeeded",
        &[],
        &[(vec![], u64::from(stats.is_coordinator_up))],
    )?;
    page.counter(
        "fletch_cluster_coordinator_errors_total",
        "Calls to the coordinator of the cluster that failed at one endpoint",
        &[],
        &[(vec![], stats.failed_calls)],
    )?;
    page.counter(
        "fletch_cluster_history_losses_total",
        "Times that the coordinator of the cluster went back in time: a backup of it was restored",
        &[],
        &[(vec![], stats.history_losses)],
    )?;
    page.gauge(
        "fletch_cluster_view",
        "Number of the view of the cluster",
        &[],
        &[(vec![], view.core.number())],
    )?;
    if let Some(revision) = server.catalog.revision() {
        page.gauge(
            "fletch_cluster_registrations_revision",
            "Revision of the cluster's registrations that this server has executed",
            &[],
            &[(vec![], revision)],
        )?;
    }
    if let Some(stats) = server.groups.stats() {
        page.gauge(
            "fletch_cluster_jobs",
            "Declared jobs of the cluster that this server has",
            &[],
            &[(vec![], stats.jobs)],
        )?;
        page.gauge(
            "fletch_cluster_groups",
            "Groups of jobs of the cluster that this server has",
            &[],
            &[(vec![], stats.groups)],
        )?;
        page.counter(
            "fletch_cluster_group_changes_total",
            "Groups that this server claimed, took over or wrote back, and jobs set aside or restored",
            &["change"],
            &[
                (vec!["claimed"], stats.claimed),
                (vec!["taken_over"], stats.taken_over),
                (vec!["set_aside"], stats.set_aside),
                (vec!["corrected"], stats.corrected),
                (vec!["reclaimed"], server.reclaims.restored()),
            ],
        )?;
    }
    let followers = [server.catalog.follower(), server.groups.follower()];
    let rows: Vec<_> = followers.into_iter().flatten().collect();
    if !rows.is_empty() {
        let rows: Vec<_> = rows.iter().map(|f| (vec![f.of()], u64::from(f.problem().is_some()))).collect();
        page.gauge(
            "fletch_cluster_follower_failing",
            "Whether this server has not followed these changes of its cluster for a minute",
            &["of"],
            &rows,
        )?;
    }
    if let Some(waiting) = server.groups.waiting_for() {
        let rows: Vec<_> = waiting.iter().map(|(id, n)| (vec![id.as_str()], *n)).collect();
        page.gauge(
            "fletch_cluster_jobs_waiting",
            "Jobs of the cluster that wait for a server that is down, or has lost their ledgers",
            &["member"],
            &rows,
        )?;
    }
    let states = view.states();
    let rows: Vec<_> = states.iter().map(|(state, n)| (vec![*state], *n)).collect();
    page.gauge("fletch_cluster_members", "Members of the cluster, by their state", &["state"], &rows)
}

/// Writes nothing for a server that is alone.
fn peers(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let Some(peers) = server.cluster.peers() else { return Ok(()) };
    let stats = peers.stats();
    let answers = stats.iter().flat_map(|s| s.answers.iter().map(|(word, n)| (s.id.as_str(), *word, *n)));
    let rows: Vec<_> = answers.map(|(id, word, n)| (vec![id, word], n)).collect();
    page.counter(
        "fletch_peer_requests_total",
        "Requests to other servers of the cluster for chunks and files, by their answer",
        &["peer", "result"],
        &rows,
    )?;
    let rows: Vec<_> = stats.iter().map(|s| (vec![s.id.as_str()], s.wrong_bytes)).collect();
    page.counter(
        "fletch_peer_wrong_bytes_total",
        "Answers of other servers whose bytes did not hash to their name. Nobody got these bytes",
        &["peer"],
        &rows,
    )?;
    let refusals = peers.refusals().counts();
    let rows: Vec<_> = refusals.iter().map(|(id, why, n)| (vec![id.as_str(), *why], *n)).collect();
    page.counter(
        "fletch_peer_refusals_total",
        "Calls between this server and another one that ended with a refusal, by the reason",
        &["peer", "reason"],
        &rows,
    )?;
    let [received, sent, foreign_fills, _, passed_on] = peers.sums();
    page.counter(
        "fletch_peer_received_bytes_total",
        "Bytes of chunks and files that other servers sent",
        &[],
        &[(vec![], received)],
    )?;
    page.counter(
        "fletch_peer_sent_bytes_total",
        "Bytes of chunks and files that were sent to other servers. No account has them",
        &[],
        &[(vec![], sent)],
    )?;
    page.counter(
        "fletch_peer_foreign_fills_total",
        "Chunks and files that this server fetched for another one, although it does not own them",
        &[],
        &[(vec![], foreign_fills)],
    )?;
    page.counter(
        "fletch_peer_passed_on_chunks_total",
        "Chunks that this server owns and another one keeps, because this server's disk had no room",
        &[],
        &[(vec![], passed_on)],
    )
}

fn connections(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let c = server.connections.stats();
    let rows = |of: &[(&'static str, u64)]| of.iter().map(|(word, n)| (vec![*word], *n)).collect::<Vec<_>>();
    page.gauge(
        "fletch_connections",
        "Open connections: `tcp`, `unix`, and in the `probe` lane, which answers probes and 429",
        &["of"],
        &rows(&c.open),
    )?;
    page.counter(
        "fletch_connections_refused_total",
        "Connections that were answered 429, by the limit that they met",
        &["limit"],
        &rows(&c.refused),
    )?;
    page.counter(
        "fletch_connections_closed_total",
        "Connections that the server closed, by the reason",
        &["reason"],
        &rows(&c.closed),
    )?;
    let (tenants, strangers, max) = server.request_memory.stats();
    page.gauge(
        "fletch_request_memory_bytes",
        "Memory of heads and bodies that arrive: of `tenants`, and of `strangers` without a token",
        &["of"],
        &[(vec!["tenants"], tenants), (vec!["strangers"], strangers)],
    )?;
    page.gauge("fletch_request_memory_limit_bytes", "Limit of that memory", &[], &[(vec![], max)])?;
    page.counter(
        "fletch_bodies_refused_total",
        "Bodies that were not read to their end: `memory`, `slow` or `too_large`",
        &["reason"],
        &rows(&server.request_memory.refused_bodies()),
    )
}

fn host(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let used = server.dashboard.host();
    let row = |n: Option<u64>| n.map(|n| (vec![], n)).into_iter().collect::<Vec<_>>();
    page.gauge(
        "fletch_state_disk_bytes",
        "Size of the file system of the state directory",
        &[],
        &row(used.state_size),
    )?;
    page.gauge("fletch_state_disk_free_bytes", "Free bytes of that file system", &[], &row(used.state_free))?;
    page.gauge(
        "fletch_process_memory_bytes",
        "Memory of the process that the kernel cannot take back",
        &[],
        &row(used.memory),
    )?;
    page.gauge(
        "fletch_process_memory_limit_bytes",
        "Memory limit of the container, or the memory of the machine",
        &[],
        &row(used.memory_limit),
    )?;
    let given = server.credentials.list();
    let expire =
        given.iter().filter_map(|of| Some((vec![of.origin.as_str()], of.expires_ns? / 1_000_000_000)));
    let rows: Vec<_> = expire.collect();
    page.gauge(
        "fletch_credentials_expire_timestamp_seconds",
        "When credentials that a user handed over expire, in seconds since 1970",
        &["origin"],
        &rows,
    )
}

fn process(page: &Page, server: &Server) -> Result<(), MetricsError> {
    page.gauge(
        "fletch_requests_in_flight",
        "Running requests for bytes",
        &[],
        &[(vec![], server.tenants.requests.used())],
    )?;
    connections(page, server)?;
    page.gauge("fletch_jobs", "Known jobs", &[], &[(vec![], server.live_jobs.len() as u64)])?;
    page.gauge(
        "fletch_datasets",
        "Registered datasets",
        &[],
        &[(vec![], server.registrations.len() as u64)],
    )?;
    let w = server.warmups.stats();
    page.gauge("fletch_warmups", "Warm-ups that wait or run", &[], &[(vec![], w.live)])?;
    page.gauge(
        "fletch_warmup_pinned_chunks",
        "Chunks that warm-ups pin, so that they are not evicted",
        &[],
        &[(vec![], w.pinned)],
    )?;
    page.counter(
        "fletch_warmup_bytes_total",
        "Bytes of chunks of warm-ups, by their outcome",
        &["result"],
        &[
            (vec!["fetched"], w.fetched.bytes),
            (vec!["refused"], w.refused.bytes),
            (vec!["failed"], w.failed.bytes),
        ],
    )?;
    let a = server.auth.stats();
    page.gauge("fletch_auth_tokens", "Tokens in force", &[], &[(vec![], a.tokens)])?;
    page.counter("fletch_auth_refused_total", "Requests without a known token", &[], &[(vec![], a.refused)])?;
    page.counter(
        "fletch_auth_reloads_total",
        "Changed tokens files: `ok` came into force, `error` had a fault",
        &["result"],
        &[(vec!["ok"], a.reloads), (vec!["error"], a.reload_errors)],
    )?;
    if let Some(tls) = server.tls.as_ref().map(Tls::stats) {
        page.counter(
            "fletch_tls_reload_errors_total",
            "Changed files of TLS with a fault, which changed nothing",
            &[],
            &[(vec![], tls.reload_errors)],
        )?;
        page.gauge(
            "fletch_tls_certificate_expires_timestamp_seconds",
            "When the certificate in force expires, in seconds since 1970",
            &[],
            &[(vec![], tls.expires_s)],
        )?;
    }
    let quotas = server.auth.quotas();
    let bound = |of, n: Option<u64>, t| n.map(|n| (vec![t, of], n));
    let rows: Vec<_> = quotas
        .iter()
        .flat_map(|(t, q)| {
            let resident = q.resident.map(|bytes| server.shares.part().of_bytes(bytes));
            [bound("registered", q.registered, t.as_str()), bound("resident", resident, t.as_str())]
        })
        .flatten()
        .collect();
    page.gauge("fletch_quota_bytes", "Quotas of tenants in bytes", &["tenant", "of"], &rows)?;
    let resident = server.resident_quotas();
    let resident =
        resident.iter().map(|(t, (_, of))| (vec![t.as_str(), "resident"], of.iter().map(|d| d.bytes).sum()));
    let registered = quotas.iter().filter(|(_, q)| q.registered.is_some());
    let registered =
        registered.map(|(t, _)| (vec![t.as_str(), "registered"], server.registrations.charged_bytes(t)));
    let rows: Vec<_> = registered.chain(resident).collect();
    page.gauge(
        "fletch_quota_used_bytes",
        "Bytes that tenants use of their quotas",
        &["tenant", "of"],
        &rows,
    )?;
    page.gauge("fletch_versions_open", "Open versions", &[], &[(vec![], server.versions.open_count())])?;
    drafts::families(page, server)?;
    host(page, server)?;
    page.gauge(
        "fletch_uptime_seconds",
        "Seconds since the start",
        &[],
        &[(vec![], server.uptime().as_secs())],
    )?;
    page.gauge(
        "fletch_build_info",
        "1, with the version of the server",
        &["version"],
        &[(vec![env!("CARGO_PKG_VERSION")], 1)],
    )
}
