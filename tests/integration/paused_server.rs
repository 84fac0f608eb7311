//! A server that is paused for longer than a lease lives: the pause ends no lease.

use fletch_api::{BatchTimes, OrderKind, PlanSpec, StartJob, Visitation, WorldSpec};
use fletch_client::epochs::{AckToken, JobHandle, Next};
use fletch_client::{Client, ClientConfig, Endpoint};
use fletch_core::plan::Tail;
use fletch_tests::fixture::Site;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::time::Duration;
use tempfile::TempDir;

/// How long a lease of the server lives.
const LEASE: &str = "2500ms";
/// Longer than a lease.
const PAUSE: Duration = Duration::from_secs(4);

/// Declares a job at a server, and takes one lease, which nobody renews.
async fn lease(site: &Site, name: &str) -> (JobHandle, AckToken) {
    let endpoint: Endpoint = site.url.parse().expect("url");
    let client = Client::new(ClientConfig::new(endpoint, "loader")).expect("client");
    let ask = StartJob {
        name: name.parse().expect("name"),
        dataset: Some("set".parse().expect("name")),
        version: None,
        root: None,
        layout: None,
        seed: Some(1),
        order: OrderKind::Strict,
        buckets: None,
        replay: None,
        plan: PlanSpec::default(),
        world: WorldSpec { ranks: 1, batch: 4, tail: Tail::Keep },
        visitation: Visitation::ExactlyOnce,
    };
    let job = client.declare(&ask).await.expect("declared");
    let mut reader = job.reader(0, 0, 0);
    let Next::Batch(batch) = reader.next(4).await.expect("a lease") else { panic!("a batch is due") };
    (job, batch.token)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_of_the_server_ends_no_lease() {
    let data = TempDir::with_prefix("fletch-paused-").expect("tree");
    for i in 0..40 {
        fs::write(data.path().join(format!("{i:03}")), vec![7u8; 500]).expect("write");
    }
    let mut site = Site::start(&["--limits-lease-ttl", LEASE]);
    let _ = site.publish("set", data.path());

    let (job, token) = lease(&site, "paused").await;
    let pid = Pid::from_raw(i32::try_from(site.server().pid()).expect("a pid"));
    kill(pid, Signal::SIGSTOP).expect("stopped");
    tokio::time::sleep(PAUSE).await;
    kill(pid, Signal::SIGCONT).expect("continued");
    let acked = job.ack(0, 0, &[token.ack(BatchTimes::default())]).await;
    assert!(acked.is_ok(), "the lease lives: {acked:?}");

    // Where the client is silent for as long, the lease ends.
    let (job, token) = lease(&site, "silent").await;
    tokio::time::sleep(PAUSE).await;
    let late = job.ack(0, 0, &[token.ack(BatchTimes::default())]).await;
    assert!(late.is_err(), "it expired: {late:?}");
}
