//! Tests that the checked-in description of the API and the documented metrics match the server.

use crate::common::{Node, Tree, body};
use fletch_core::Hash;
use fletch_testkit::tls::Authority;
use reqwest::StatusCode;
use std::{collections::BTreeSet, path::PathBuf};

fn docs(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name)
}

#[test]
fn the_description_of_the_api_is_checked_in() {
    let at = docs("openapi.json");
    let now = fletch_server::openapi_json();
    if std::env::var_os("FLETCH_WRITE_OPENAPI").is_some() {
        std::fs::write(&at, &now).expect("write");
    }
    let checked_in = std::fs::read_to_string(&at).unwrap_or_default();
    assert!(
        checked_in == now,
        "docs/openapi.json differs from the code. If the change is meant, write it anew:\n\
         FLETCH_WRITE_OPENAPI=1 cargo test -p fletch-server --test contract"
    );
}

/// The metrics of open and measured jobs. `allocations` has such jobs, and asks for them.
const OF_JOBS: [&str; 9] = [
    "fletch_job_speed_ratio",
    "fletch_job_waits_for",
    "fletch_job_samples_per_second",
    "fletch_job_time_ratio",
    "fletch_job_cached_ratio",
    "fletch_job_info",
    "fletch_job_epoch",
    "fletch_job_epoch_entries",
    "fletch_job_rank_entries_left",
];

/// The metric of credentials with an end, which only a user's own server takes. `credentials` asks for it.
const OF_OWN_SERVERS: [&str; 1] = ["fletch_credentials_expire_timestamp_seconds"];

/// What the metrics of servers of a cluster begin with. `tests/integration/cluster_reads/` asks for them.
const OF_CLUSTERS: [&str; 5] = [
    "fletch_peer_",
    "fletch_cluster_registrations_",
    "fletch_cluster_follower_",
    "fletch_cluster_jobs",
    "fletch_cluster_group",
];

#[tokio::test]
async fn every_metric_is_documented_and_every_documented_metric_exists() {
    let tree = Tree::usual();
    let root = tree.index().root();
    // Every metric is served by a server that asks for tokens, has a quota, and speaks TLS.
    let dir = tempfile::tempdir().expect("tempdir");
    let tokens = dir.path().join("tokens.toml");
    let text = format!(
        "[[token]]\nhash = \"{}\"\ntenant = \"t\"\nrole = \"admin\"\n[[tenant]]\nname = \"t\"\nregistered = \
            \"1GiB\"\nresident = \"1GiB\"\n",
        Hash::of(b"secret")
    );
    std::fs::write(&tokens, text).expect("write");
    let tokens = format!("--auth-tokens={}", tokens.display());
    let authority = Authority::new("tests");
    let (cert, key) = authority.server(&["127.0.0.1"], 4000).write(dir.path(), "server");
    let tls = [format!("--tls-cert-file={}", cert.display()), format!("--tls-key-file={}", key.display())];
    let dirs = format!("--local-dirs={}=*", tree.uri());
    let mut node = Node::start(&[&tokens, &dirs, &tls[0], &tls[1]]).await;
    let ca = reqwest::Certificate::from_pem(authority.pem().as_bytes()).expect("a certificate");
    let token = "Bearer secret".parse().expect("a header's value");
    let headers = [(reqwest::header::AUTHORIZATION, token)].into_iter().collect();
    let http = reqwest::Client::builder().default_headers(headers).tls_certs_only([ca]);
    node.http = http.build().expect("client");
    node.register("d", &tree.uri(), None).await;
    let file = format!("/v1/versions/{root}/files/a.bin");
    body(node.get(&file).send().await.expect("answer"), StatusCode::OK).await;
    let page = node.get("/metrics").send().await.expect("answer").text().await.expect("text");
    let served: BTreeSet<&str> =
        page.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    let text = std::fs::read_to_string(docs("METRICS.md")).expect("docs/METRICS.md");
    let documented: BTreeSet<&str> = text
        .lines()
        .filter_map(|l| l.strip_prefix("| `")?.split(['`', '{']).next())
        .filter(|name| name.starts_with("fletch_") && !OF_JOBS.contains(name))
        .filter(|name| !OF_OWN_SERVERS.contains(name))
        .filter(|name| !OF_CLUSTERS.iter().any(|family| name.starts_with(family)))
        .collect();
    assert_eq!(served, documented);
    node.running.shutdown().await;
}
