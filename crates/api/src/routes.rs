//! The routes of the API: each as a template for the router, and as a function that returns a client's path.

use fletch_core::{DatasetName, Hash, LayoutId, MemberId, MountId, Root};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// The characters of an entry's path that are percent-encoded.
const PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// GET, HEAD: a chunk of a version.
pub const CHUNK: &str = "/v1/versions/{root}/chunks/{hash}";
/// GET: the hashes of the groups of a chunk.
pub const CHUNK_GROUPS: &str = "/v1/versions/{root}/chunks/{hash}/groups";
/// GET, HEAD: the manifest of a version.
pub const MANIFEST: &str = "/v1/versions/{root}/manifest.json";
/// GET, HEAD: the entries table of a version.
pub const ENTRIES: &str = "/v1/versions/{root}/entries.parquet";
/// GET, HEAD: the description of a layout.
pub const LAYOUT: &str = "/v1/versions/{root}/layouts/{layout}/layout.json";
/// GET, HEAD: the placement table of a layout.
pub const PLACEMENT: &str = "/v1/versions/{root}/layouts/{layout}/placement.parquet";
/// GET, HEAD: a file of a version, by its path.
pub const FILE: &str = "/v1/versions/{root}/files/{*path}";
/// GET: whether the caller has access to a version. The answer can wait for a change.
pub const ACCESS: &str = "/v1/versions/{root}/access";
/// POST: many pieces of a version in one stream.
pub const BATCH: &str = "/v1/versions/{root}/batch";
/// GET: begins a hit connection ([`crate::hits`]).
pub const HITS: &str = "/v1/hits";
/// GET: all datasets. POST: registers a dataset.
pub const DATASETS: &str = "/v1/datasets";
/// GET: a dataset. PUT: registers it by its URI, and lists it. DELETE: deletes its registration.
pub const DATASET: &str = "/v1/datasets/{name}";
/// GET: the version that a tag or root of a dataset names.
pub const DATASET_VERSION: &str = "/v1/datasets/{name}/versions/{version}";
/// GET: the tags of a dataset.
pub const DATASET_TAGS: &str = "/v1/datasets/{name}/tags";
/// GET: the objects of a dataset that have the indexed bytes under other entity tags.
pub const RENEWED_PINS: &str = "/v1/datasets/{name}/renewed-pins";
/// GET: the files of a draft that the server has read whole.
pub const LEARNED: &str = "/v1/versions/{root}/learned";
/// GET: the last listing of a dataset by the server.
pub const LISTING: &str = "/v1/datasets/{name}/listing";
/// GET: the last sealing of a dataset. POST: seals its draft.
pub const SEAL: &str = "/v1/datasets/{name}/seal";
/// DELETE: evicts a dataset's chunks from disk.
pub const DATASET_CHUNKS: &str = "/v1/datasets/{name}/chunks";
/// GET: which dataset has how much of the disk, and why.
pub const ALLOCATION: &str = "/v1/allocation";
/// GET: all warm-ups. POST: starts a warm-up.
pub const WARMUPS: &str = "/v1/warmups";
/// GET: a warm-up. DELETE: cancels it.
pub const WARMUP: &str = "/v1/warmups/{id}";
/// GET: all jobs. POST: declares a job.
pub const JOBS: &str = "/v1/jobs";
/// GET: a job. DELETE: deletes it with its ledgers.
pub const JOB: &str = "/v1/jobs/{id}";
/// PUT: changes the world of a job.
pub const JOB_WORLD: &str = "/v1/jobs/{id}/world";
/// POST: probes a job.
pub const JOB_PROBE: &str = "/v1/jobs/{id}/probe";
/// POST: a rank of a job whose server is lost says what it consumed.
pub const JOB_RECLAIM: &str = "/v1/jobs/{id}/reclaim";
/// POST: moves a job to another server.
pub const JOB_MOVE: &str = "/v1/jobs/{id}/move";
/// PUT: a server gives a job to another one, with its ledgers.
pub const PEER_JOB: &str = "/v1/peers/jobs/{id}";
/// POST: the process of a rank is lost, too.
pub const JOB_LOST: &str = "/v1/jobs/{id}/lost";
/// PUT: changes the settings of a job.
pub const JOB_SETTINGS: &str = "/v1/jobs/{id}/settings";
/// POST: leases the next samples of an epoch.
pub const LEASES: &str = "/v1/jobs/{id}/epochs/{epoch}/leases";
/// POST: acknowledges samples and renews leases.
pub const ACKS: &str = "/v1/jobs/{id}/epochs/{epoch}/acks";
/// GET: what a rank acknowledged in an epoch, for a process that begins to read as this rank.
pub const RECORD: &str = "/v1/jobs/{id}/epochs/{epoch}/record";
/// GET: the state of an epoch. PUT: continues an epoch from a state.
pub const STATE: &str = "/v1/jobs/{id}/epochs/{epoch}/state";
/// POST: commits the acknowledged samples with a checkpoint of the model.
pub const CHECKPOINT: &str = "/v1/jobs/{id}/epochs/{epoch}/checkpoint";
/// POST: rolls the job back to a checkpoint.
pub const ROLLBACK: &str = "/v1/jobs/{id}/epochs/{epoch}/rollback";
/// GET: the receipt of a finished epoch.
pub const RECEIPT: &str = "/v1/jobs/{id}/epochs/{epoch}/receipt";
/// GET: the ledger of an epoch.
pub const LEDGER: &str = "/v1/jobs/{id}/epochs/{epoch}/ledger";
/// GET: the credentials that the server holds, without secrets. PUT: gives it credentials of one origin.
pub const CREDENTIALS: &str = "/v1/origins/credentials";
/// POST: credentials for the S3 door, derived from the caller's token.
pub const S3_CREDENTIALS: &str = "/v1/s3/credentials";
/// GET: the mounts that the caller may see.
pub const MOUNTS: &str = "/v1/mounts";
/// PUT: announces a mount. DELETE: forgets it.
pub const MOUNT: &str = "/v1/mounts/{id}";
/// GET: the member view of the cluster.
pub const CLUSTER: &str = "/v1/cluster";
/// What one server of the cluster says of itself, for `fletch cluster check`.
pub const CLUSTER_CHECK: &str = "/v1/cluster/check";
/// POST: writes the keys of the cluster back to an etcd that lost them.
pub const CLUSTER_RECOVER: &str = "/v1/cluster/recover";
/// GET: what a server holds of its cluster, for another one. PUT: writes it to etcd.
pub const PEER_KEYS: &str = "/v1/peers/cluster/keys";
/// POST: takes a member out of the ring of the cluster.
pub const MEMBER_DRAIN: &str = "/v1/cluster/members/{id}/drain";
/// GET: a chunk, for another server of the cluster.
pub const PEER_CHUNK: &str = "/v1/peers/versions/{root}/chunks/{hash}";
/// GET: a file that lies in a chunk with others, for another server of the cluster.
pub const PEER_FILE: &str = "/v1/peers/versions/{root}/files/{ordinal}";
/// DELETE: evicts a dataset's chunks, for another server of the cluster.
pub const PEER_DATASET_CHUNKS: &str = "/v1/peers/datasets/{name}/chunks";
/// PUT: sets how long the chunks of a warm-up stay protected, for another server of the cluster.
pub const PEER_WARMUP: &str = "/v1/peers/warmups/{id}";
/// What the routes for other servers of the cluster begin with.
pub const PEERS: &str = "/v1/peers/";
/// GET: the server's version, formats and limits.
pub const INFO: &str = "/v1/info";
/// GET: the origins of registered datasets, and whether they work.
pub const ORIGINS: &str = "/v1/origins";
/// GET: the accounts of delivered bytes.
pub const ACCOUNTS: &str = "/v1/accounts";
/// GET: what the admin page shows now.
pub const DASHBOARD: &str = "/v1/dashboard";
/// GET: what the admin page shows, as a stream of events.
pub const DASHBOARD_EVENTS: &str = "/v1/dashboard/events";
/// GET: the numbers of the admin page over time.
pub const DASHBOARD_HISTORY: &str = "/v1/dashboard/history";
/// GET: a job as the admin page shows it.
pub const DASHBOARD_JOB: &str = "/v1/dashboard/jobs/{id}";
/// GET: the receipt of a finished epoch of a job that the admin page shows.
pub const DASHBOARD_RECEIPT: &str = "/v1/dashboard/jobs/{id}/epochs/{epoch}/receipt";
/// GET: a dataset as the admin page shows it.
pub const DASHBOARD_DATASET: &str = "/v1/dashboard/datasets/{domain}/{name}";
/// GET: the OpenAPI description of this API.
pub const OPENAPI: &str = "/v1/openapi.json";
/// GET: the admin page.
pub const PAGE: &str = "/";
/// GET: a file of the admin page.
pub const PAGE_FILE: &str = "/page/{*file}";
/// GET: the runbook of an alert.
pub const RUNBOOK: &str = "/runbooks/{name}";
/// GET: whether the process runs.
pub const LIVEZ: &str = "/livez";
/// GET: whether the server has started.
pub const STARTUPZ: &str = "/startupz";
/// GET: whether the server accepts requests.
pub const READYZ: &str = "/readyz";
/// GET: metrics in Prometheus format.
pub const METRICS: &str = "/metrics";

/// Returns the path of a chunk.
#[must_use]
pub fn chunk(root: Root, hash: Hash) -> String {
    format!("/v1/versions/{root}/chunks/{hash}")
}

/// Returns the path of the hashes of a chunk's groups.
#[must_use]
pub fn chunk_groups(root: Root, hash: Hash) -> String {
    format!("/v1/versions/{root}/chunks/{hash}/groups")
}

/// Returns the path of a chunk for another server of the cluster.
#[must_use]
pub fn peer_chunk(root: Root, hash: Hash) -> String {
    format!("/v1/peers/versions/{root}/chunks/{hash}")
}

/// Returns the path of a file for another server of the cluster.
#[must_use]
pub fn peer_file(root: Root, ordinal: u64) -> String {
    format!("/v1/peers/versions/{root}/files/{ordinal}")
}

/// Returns the path of a dataset's chunks for another server of the cluster.
#[must_use]
pub fn peer_dataset_chunks(name: &DatasetName) -> String {
    format!("/v1/peers/datasets/{name}/chunks")
}

/// Returns the path of a warm-up for another server of the cluster.
#[must_use]
pub fn peer_warmup(id: &str) -> String {
    format!("/v1/peers/warmups/{id}")
}

/// Returns the path of a manifest.
#[must_use]
pub fn manifest(root: Root) -> String {
    format!("/v1/versions/{root}/manifest.json")
}

/// Returns the path of the entries table.
#[must_use]
pub fn entries(root: Root) -> String {
    format!("/v1/versions/{root}/entries.parquet")
}

/// Returns the path of a layout's description.
#[must_use]
pub fn layout(root: Root, layout: LayoutId) -> String {
    format!("/v1/versions/{root}/layouts/{layout}/layout.json")
}

/// Returns the path of a layout's placement table.
#[must_use]
pub fn placement(root: Root, layout: LayoutId) -> String {
    format!("/v1/versions/{root}/layouts/{layout}/placement.parquet")
}

/// Returns the path of a file. `path` is the path of an entry.
#[must_use]
pub fn file(root: Root, path: &str) -> String {
    format!("/v1/versions/{root}/files/{}", escaped(path))
}

/// Returns an entry's path, percent-encoded for a URL.
pub(crate) fn escaped(path: &str) -> impl std::fmt::Display + '_ {
    utf8_percent_encode(path, PATH)
}

/// Returns the path of the access check.
///
/// The server delays the answer up to `wait_ms` milliseconds while access lasts.
#[must_use]
pub fn access(root: Root, wait_ms: u64) -> String {
    format!("/v1/versions/{root}/access?wait_ms={wait_ms}")
}

/// Returns the path of a batch.
#[must_use]
pub fn batch(root: Root) -> String {
    format!("/v1/versions/{root}/batch")
}

/// Returns the path of a dataset.
#[must_use]
pub fn dataset(name: &DatasetName) -> String {
    format!("/v1/datasets/{name}")
}

/// Returns the path of the renewed pins of a dataset, after the object `after`.
#[must_use]
pub fn renewed_pins(name: &DatasetName, after: Option<&str>) -> String {
    let path = format!("/v1/datasets/{name}/renewed-pins");
    match after {
        Some(after) => format!("{path}?after={}", utf8_percent_encode(after, NON_ALPHANUMERIC)),
        None => path,
    }
}

/// Returns the path of a page of what a server learned of a draft, from the entry `after` on.
#[must_use]
pub fn learned(root: Root, after: u64) -> String {
    format!("/v1/versions/{root}/learned?after={after}")
}

/// Returns the path of the sealing of a dataset.
#[must_use]
pub fn seal(name: &DatasetName) -> String {
    format!("/v1/datasets/{name}/seal")
}

/// Returns the path of a dataset's chunks on disk.
#[must_use]
pub fn dataset_chunks(name: &DatasetName) -> String {
    format!("/v1/datasets/{name}/chunks")
}

/// Returns the path of a warm-up.
#[must_use]
pub fn warmup(id: &str) -> String {
    format!("/v1/warmups/{id}")
}

/// Returns the path of a job.
#[must_use]
pub fn job(id: &str) -> String {
    format!("/v1/jobs/{id}")
}

/// Returns the path of a job's probe.
#[must_use]
pub fn job_probe(id: &str) -> String {
    format!("/v1/jobs/{id}/probe")
}

/// Returns the path by which a rank of a job reclaims.
#[must_use]
pub fn job_reclaim(id: &str) -> String {
    format!("/v1/jobs/{id}/reclaim")
}

/// Returns the path by which a job moves.
#[must_use]
pub fn job_move(id: &str) -> String {
    format!("/v1/jobs/{id}/move")
}

/// Returns the path by which a server gives a job to another one.
#[must_use]
pub fn peer_job(id: &str) -> String {
    format!("/v1/peers/jobs/{id}")
}

/// Returns the path by which a rank of a job is given up.
#[must_use]
pub fn job_lost(id: &str) -> String {
    format!("/v1/jobs/{id}/lost")
}

/// Returns the path of a job's settings.
#[must_use]
pub fn job_settings(id: &str) -> String {
    format!("/v1/jobs/{id}/settings")
}

/// Returns the path of a job's world.
#[must_use]
pub fn job_world(id: &str) -> String {
    format!("/v1/jobs/{id}/world")
}

/// Returns a path of an epoch.
///
/// `what` is `leases`, `acks`, `state`, `checkpoint`, `rollback`, `receipt` or `ledger`.
#[must_use]
pub fn epoch(id: &str, epoch: u64, what: &str) -> String {
    format!("/v1/jobs/{id}/epochs/{epoch}/{what}")
}

/// Returns the path of a mount.
#[must_use]
pub fn mount(id: &MountId) -> String {
    format!("/v1/mounts/{id}")
}

/// Returns the path of the drain of a member.
#[must_use]
pub fn member_drain(id: &MemberId) -> String {
    format!("/v1/cluster/members/{id}/drain")
}

/// Returns the path of the tags of a dataset.
#[must_use]
pub fn dataset_tags(name: &DatasetName) -> String {
    format!("/v1/datasets/{name}/tags")
}

/// Returns the path of a version of a dataset. `version` is a tag or a root; both need no encoding.
#[must_use]
pub fn dataset_version(name: &DatasetName, version: &str) -> String {
    format!("/v1/datasets/{name}/versions/{version}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_fill_their_templates() {
        let (h, name) = (Hash::of(b"x"), DatasetName::new("d").expect("name"));
        let (root, lay) = (Root(h), LayoutId(h));
        let fill = |t: &str| {
            t.replace("{root}", &h.to_string())
                .replace("{layout}", &h.to_string())
                .replace("{hash}", &h.to_string())
                .replace("{name}", "d")
                .replace("{version}", "latest")
        };
        assert_eq!(chunk(root, h), fill(CHUNK));
        assert_eq!(chunk_groups(root, h), fill(CHUNK_GROUPS));
        assert_eq!(manifest(root), fill(MANIFEST));
        assert_eq!(peer_chunk(root, h), fill(PEER_CHUNK));
        assert_eq!(peer_dataset_chunks(&name), fill(PEER_DATASET_CHUNKS));
        assert_eq!(peer_warmup("7"), PEER_WARMUP.replace("{id}", "7"));
        assert_eq!(peer_file(root, 7), fill(PEER_FILE).replace("{ordinal}", "7"));
        assert!([PEER_CHUNK, PEER_FILE].iter().all(|route| route.starts_with(PEERS)));
        assert_eq!(entries(root), fill(ENTRIES));
        assert_eq!(layout(root, lay), fill(LAYOUT));
        assert_eq!(placement(root, lay), fill(PLACEMENT));
        assert_eq!(file(root, "a/b #1?%.é"), fill(FILE).replace("{*path}", "a/b%20%231%3F%25.%C3%A9"));
        assert_eq!(access(root, 7), fill(ACCESS) + "?wait_ms=7");
        assert_eq!(batch(root), fill(BATCH));
        assert_eq!(dataset(&name), fill(DATASET));
        assert_eq!(dataset_chunks(&name), fill(DATASET_CHUNKS));
        assert_eq!(learned(root, 7), fill(LEARNED) + "?after=7");
        assert_eq!(seal(&name), fill(SEAL));
        assert_eq!(renewed_pins(&name, None), fill(RENEWED_PINS));
        assert_eq!(renewed_pins(&name, Some("a/é&")), fill(RENEWED_PINS) + "?after=a%2F%C3%A9%26");
        assert_eq!(warmup("x"), WARMUP.replace("{id}", "x"));
        assert_eq!(dataset_version(&name, "latest"), fill(DATASET_VERSION));
        assert_eq!(dataset_tags(&name), fill(DATASET_TAGS));
        assert_eq!(mount(&MountId::new("x").expect("name")), MOUNT.replace("{id}", "x"));
        assert_eq!(member_drain(&MemberId::new("x").expect("name")), MEMBER_DRAIN.replace("{id}", "x"));
        assert_eq!(job("x"), JOB.replace("{id}", "x"));
        assert_eq!(job_world("x"), JOB_WORLD.replace("{id}", "x"));
        assert_eq!(job_probe("x"), JOB_PROBE.replace("{id}", "x"));
        assert_eq!(job_reclaim("x"), JOB_RECLAIM.replace("{id}", "x"));
        assert_eq!(job_lost("x"), JOB_LOST.replace("{id}", "x"));
        assert_eq!(job_move("x"), JOB_MOVE.replace("{id}", "x"));
        assert_eq!(peer_job("x"), PEER_JOB.replace("{id}", "x"));
        assert_eq!(job_settings("x"), JOB_SETTINGS.replace("{id}", "x"));
        for (what, template) in [
            ("leases", LEASES),
            ("acks", ACKS),
            ("state", STATE),
            ("receipt", RECEIPT),
            ("ledger", LEDGER),
            ("checkpoint", CHECKPOINT),
            ("rollback", ROLLBACK),
        ] {
            assert_eq!(epoch("x", 7, what), template.replace("{id}", "x").replace("{epoch}", "7"));
        }
    }
}
