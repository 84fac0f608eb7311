//! `fletch cluster check` beside servers that agree, differ, refuse each other, and are gone.

use fletch_tests::bins::{command, run, stdout};
use fletch_tests::cluster::{ClusterServer, EtcdCluster, agreed};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use std::fs;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

/// How soon all servers have seen a change that etcd knows.
const NEWS: Duration = Duration::from_secs(2);

/// Checks the cluster at a server. Returns the exit code, and what was printed.
fn check(server: &ClusterServer, token: Option<&Path>) -> (Option<i32>, String) {
    let mut c = command("fletch");
    c.args(["cluster", "check", "--server", &server.url]);
    if let Some(file) = token {
        c.arg("--token-file").arg(file);
    }
    let out = c.output().expect("fletch runs");
    let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    (out.status.code(), text.concat())
}

#[test]
fn servers_are_compared_by_what_they_say() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let etcd = EtcdCluster::start(1);
    let mut servers = ["a", "b", "c"].map(|id| {
        let mut server = ClusterServer::new(id, &etcd, &[]);
        server.start();
        server
    });
    agreed(&servers.each_ref(), "a:up b:up c:up", NEWS);
    let (code, text) = check(&servers[0], None);
    assert!(code == Some(0) && text.contains("8 checks: healthy"), "{text}");
    assert_eq!(text.matches("2 of 2").count(), 3, "each server hears the two others: {text}");

    // One has another limit.
    servers[1].end();
    servers[1].add("--limits-lease-ttl=77s".to_owned());
    servers[1].start();
    agreed(&servers.each_ref(), "a:up b:up c:up", NEWS);
    let (code, text) = check(&servers[0], None);
    assert!(code == Some(3) && text.contains("limits.lease_ttl differs: "), "{text}");

    // One is cut off from etcd, and one is gone.
    servers[1].cut_all(true);
    servers[2].kill();
    until("both are named", Duration::from_secs(20), || {
        let (code, text) = check(&servers[0], None);
        let is_named = text.contains("b does not reach etcd") || text.contains("b is not ready");
        code == Some(1) && is_named && text.contains("answer: c is away")
    });
}

#[test]
fn a_wrong_peer_token_is_named() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let (etcd, scratch) = (EtcdCluster::start(1), TempDir::with_prefix("fletch-check-").expect("scratch"));
    let at = |name: &str| scratch.path().join(name);
    let token = |tokens: &str, role: &str| {
        let mut c = command("fletch-server");
        c.args(["token", "new", "--role", role, "--append"]).arg(at(tokens));
        if role != "peer" {
            c.args(["--tenant", "ops"]);
        }
        let name = at(&format!("{role}-of-{tokens}"));
        fs::write(&name, stdout(&run(&mut c))).expect("token");
        name
    };
    let (admin, peer, wrong) = (token("tokens", "admin"), token("tokens", "peer"), token("others", "peer"));
    let servers = [("a", &peer), ("b", &wrong)].map(|(id, peer)| {
        let words = [
            format!("--auth-tokens={}", at("tokens").display()),
            format!("--cluster-peer-token-file={}", peer.display()),
        ];
        let mut server = ClusterServer::new(id, &etcd, &words.each_ref().map(String::as_str));
        server.start();
        server
    });
    until("the wrong token is named", Duration::from_secs(20), || {
        let (code, text) = check(&servers[0], Some(&admin));
        let is_refused = text.contains("b says: a (token): it answered 401") && text.contains("1 of 1");
        code == Some(1) && text.contains("b gets no answer of a: it answered 401") && is_refused
    });
    let warnings = |s: &ClusterServer, reason: &str| {
        let log = s.log();
        log.lines().filter(|l| l.contains("two servers refuse each other") && l.contains(reason)).count()
    };
    check(&servers[0], Some(&admin));
    assert_eq!(warnings(&servers[1], "token"), 1, "once, however often it happens: {}", servers[1].log());
    assert_eq!(warnings(&servers[0], "token"), 0, "{}", servers[0].log());
    // The peer token is mended.
    fs::copy(&peer, &wrong).expect("token");
    until("the refusal has ended", Duration::from_secs(20), || {
        let (_, text) = check(&servers[0], Some(&admin));
        !text.contains("b says: ") && servers[1].log().contains("the refusal between two servers has ended")
    });
    // A server without tokens joins.
    let mut open = ClusterServer::new("c", &etcd, &[]);
    open.start();
    until("all three say so", Duration::from_secs(10), || {
        let of = |s: &ClusterServer| warnings(s, "tokens_differ");
        of(&servers[0]) == 1 && of(&servers[1]) == 1 && of(&open) == 2
    });
    assert_eq!(open.sum("fletch_peer_refusals_total"), 2.0, "{}", open.text("/metrics"));
    let (code, text) = check(&servers[0], Some(&admin));
    assert!(code == Some(1) && text.contains("a says: c (tokens_differ): it serves everybody"), "{text}");
    let mut c = command("fletch");
    c.args(["cluster", "check", "--server", &servers[0].url]);
    let refused = c.output().expect("fletch runs");
    assert_eq!(refused.status.code(), Some(5), "without a token: {refused:?}");
}
