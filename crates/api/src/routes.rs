//! Every route, once as the template a router takes and once as a function a client calls.

use fletch_core::{DatasetName, Hash, LayoutId, Root};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// What of an entry's path is written as it is.
const PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// A chunk of a version: GET, HEAD.
pub const CHUNK: &str = "/v1/versions/{root}/chunks/{hash}";
/// A version's manifest: GET, HEAD.
pub const MANIFEST: &str = "/v1/versions/{root}/manifest.json";
/// A version's entries: GET, HEAD.
pub const ENTRIES: &str = "/v1/versions/{root}/entries.parquet";
/// A layout's description: GET, HEAD.
pub const LAYOUT: &str = "/v1/versions/{root}/layouts/{layout}/layout.json";
/// A layout's placement: GET, HEAD.
pub const PLACEMENT: &str = "/v1/versions/{root}/layouts/{layout}/placement.parquet";
/// A file of a version by its path: GET, HEAD.
pub const FILE: &str = "/v1/versions/{root}/files/{*path}";
/// Whether a version is granted to whoever asks, and until when: GET.
pub const ACCESS: &str = "/v1/versions/{root}/access";
/// Many pieces of a version in one stream: POST.
pub const BATCH: &str = "/v1/versions/{root}/batch";
/// All datasets: GET; registering one: POST.
pub const DATASETS: &str = "/v1/datasets";
/// One dataset: GET, DELETE.
pub const DATASET: &str = "/v1/datasets/{name}";
/// What a tag or root of a dataset is now: GET.
pub const DATASET_VERSION: &str = "/v1/datasets/{name}/versions/{version}";
/// A dataset's chunks on disk: DELETE.
pub const DATASET_CHUNKS: &str = "/v1/datasets/{name}/chunks";
/// Warm-ups: GET; beginning one: POST.
pub const WARMUPS: &str = "/v1/warmups";
/// A warm-up: GET; cancelling it: DELETE.
pub const WARMUP: &str = "/v1/warmups/{id}";
/// Jobs: GET; declaring one: POST.
pub const JOBS: &str = "/v1/jobs";
/// A job: GET; forgetting it: DELETE.
pub const JOB: &str = "/v1/jobs/{id}";
/// Who shares a job's steps: PUT.
pub const JOB_WORLD: &str = "/v1/jobs/{id}/world";
/// The next samples of an epoch: POST.
pub const LEASES: &str = "/v1/jobs/{id}/epochs/{epoch}/leases";
/// What was consumed, and what is still held: POST.
pub const ACKS: &str = "/v1/jobs/{id}/epochs/{epoch}/acks";
/// An epoch's self-contained state: GET, PUT.
pub const STATE: &str = "/v1/jobs/{id}/epochs/{epoch}/state";
/// The model was saved: POST.
pub const CHECKPOINT: &str = "/v1/jobs/{id}/epochs/{epoch}/checkpoint";
/// The model went back to a checkpoint: POST.
pub const ROLLBACK: &str = "/v1/jobs/{id}/epochs/{epoch}/rollback";
/// The receipt of a finished epoch: GET.
pub const RECEIPT: &str = "/v1/jobs/{id}/epochs/{epoch}/receipt";
/// An epoch's ledger: GET.
pub const LEDGER: &str = "/v1/jobs/{id}/epochs/{epoch}/ledger";
/// The member view: GET.
pub const CLUSTER: &str = "/v1/cluster";
/// What this server speaks: GET.
pub const INFO: &str = "/v1/info";
/// Bytes delivered: GET.
pub const ACCOUNTS: &str = "/v1/accounts";
/// The description of this API: GET.
pub const OPENAPI: &str = "/v1/openapi.json";
/// Whether the process runs: GET.
pub const LIVEZ: &str = "/livez";
/// Whether it wants requests: GET.
pub const READYZ: &str = "/readyz";
/// Prometheus metrics: GET.
pub const METRICS: &str = "/metrics";

/// Path of a chunk.
#[must_use]
pub fn chunk(root: Root, hash: Hash) -> String {
    format!("/v1/versions/{root}/chunks/{hash}")
}

/// Path of a manifest.
#[must_use]
pub fn manifest(root: Root) -> String {
    format!("/v1/versions/{root}/manifest.json")
}

/// Path of the entries table.
#[must_use]
pub fn entries(root: Root) -> String {
    format!("/v1/versions/{root}/entries.parquet")
}

/// Path of a layout's description.
#[must_use]
pub fn layout(root: Root, layout: LayoutId) -> String {
    format!("/v1/versions/{root}/layouts/{layout}/layout.json")
}

/// Path of a layout's placement table.
#[must_use]
pub fn placement(root: Root, layout: LayoutId) -> String {
    format!("/v1/versions/{root}/layouts/{layout}/placement.parquet")
}

/// Path of a file; `path` is an entry's path.
#[must_use]
pub fn file(root: Root, path: &str) -> String {
    format!("/v1/versions/{root}/files/{}", escaped(path))
}

/// An entry's path as it stands in a URL.
pub(crate) fn escaped(path: &str) -> impl std::fmt::Display + '_ {
    utf8_percent_encode(path, PATH)
}

/// Path of a grant; the answer is held back for `wait_ms` milliseconds while nothing changes.
#[must_use]
pub fn access(root: Root, wait_ms: u64) -> String {
    format!("/v1/versions/{root}/access?wait_ms={wait_ms}")
}

/// Path of a batch.
#[must_use]
pub fn batch(root: Root) -> String {
    format!("/v1/versions/{root}/batch")
}

/// Path of a dataset.
#[must_use]
pub fn dataset(name: &DatasetName) -> String {
    format!("/v1/datasets/{name}")
}

/// Path of a dataset's chunks on disk.
#[must_use]
pub fn dataset_chunks(name: &DatasetName) -> String {
    format!("/v1/datasets/{name}/chunks")
}

/// Path of a warm-up.
#[must_use]
pub fn warmup(id: &str) -> String {
    format!("/v1/warmups/{id}")
}

/// Path of a job.
#[must_use]
pub fn job(id: &str) -> String {
    format!("/v1/jobs/{id}")
}

/// Path of a job's world.
#[must_use]
pub fn job_world(id: &str) -> String {
    format!("/v1/jobs/{id}/world")
}

/// Path of something of an epoch: `leases`, `acks`, `state`, `checkpoint`, `rollback`, `receipt` or `ledger`.
#[must_use]
pub fn epoch(id: &str, epoch: u64, what: &str) -> String {
    format!("/v1/jobs/{id}/epochs/{epoch}/{what}")
}

/// Path of a version of a dataset; `version` is a tag or a root, both safe in a URL.
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
        assert_eq!(manifest(root), fill(MANIFEST));
        assert_eq!(entries(root), fill(ENTRIES));
        assert_eq!(layout(root, lay), fill(LAYOUT));
        assert_eq!(placement(root, lay), fill(PLACEMENT));
        assert_eq!(file(root, "a/b #1?%.é"), fill(FILE).replace("{*path}", "a/b%20%231%3F%25.%C3%A9"));
        assert_eq!(access(root, 7), fill(ACCESS) + "?wait_ms=7");
        assert_eq!(batch(root), fill(BATCH));
        assert_eq!(dataset(&name), fill(DATASET));
        assert_eq!(dataset_chunks(&name), fill(DATASET_CHUNKS));
        assert_eq!(warmup("x"), WARMUP.replace("{id}", "x"));
        assert_eq!(dataset_version(&name, "latest"), fill(DATASET_VERSION));
        assert_eq!(job("x"), JOB.replace("{id}", "x"));
        assert_eq!(job_world("x"), JOB_WORLD.replace("{id}", "x"));
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
