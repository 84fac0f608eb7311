//! Tests of the node's label, against an API server that records what it is asked for.

use super::*;
use fletch_testkit::{
    scripted::{ScriptedServer, answer, header},
    tls,
};
use std::{fs, path::Path, sync::Arc};

const PATCH: &str = "PATCH /api/v1/nodes/node-7.example?fieldManager=fletch-mount HTTP/1.1\r\n";
const SET: &str = r#"{"metadata":{"labels":{"fletch/mounts":"ready"}}}"#;
const UNSET: &str = r#"{"metadata":{"labels":{"fletch/mounts":null}}}"#;

/// Starts an API server that takes the token `good` only.
fn api_server() -> ScriptedServer {
    ScriptedServer::start_tls(|head| match header(head, "authorization") {
        Some("Bearer good") => answer("200 OK", &[("Content-Type", "application/json")], b"{}"),
        _ => answer("403 Forbidden", &[], br#"{"message":"nodes \"node-7\" is forbidden"}"#),
    })
}

fn label(dir: &Path, server: &ScriptedServer, domains: &[&str]) -> NodeLabel {
    fs::copy(tls::authority(), dir.join("ca.crt")).expect("the CA");
    let when = domains.iter().map(|domain| dir.join(domain)).collect();
    let settings = NodeLabelSettings { node: "node-7.example".into(), when, account: dir.to_owned() };
    let address = server.address();
    NodeLabel::new(settings, Some(address.ip().to_string()), Some(address.port().to_string()))
        .expect("usable")
}

/// Returns the bodies of all requests, each of which has the one head that is right.
fn bodies(server: &ScriptedServer, token: &str) -> Vec<String> {
    let all = server.requests().into_iter().map(|request| {
        let (head, body) = request.split_once("\r\n\r\n").expect("a head");
        assert!(head.starts_with(PATCH), "{head}");
        assert_eq!(header(head, "content-type"), Some("application/merge-patch+json"));
        assert_eq!(header(head, "authorization"), Some(&*format!("Bearer {token}")));
        body.to_owned()
    });
    all.collect()
}

#[tokio::test]
async fn the_label_is_set_while_all_domains_are_mounted() {
    let (dir, server) = (tempfile::tempdir().expect("a directory"), api_server());
    fs::write(dir.path().join("token"), "good\n").expect("token");
    let label = label(dir.path(), &server, &["a", "b"]);
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    // A node that was restarted has the label of the day before.
    label.send_changes().await.expect("sent");
    fs::write(&a, "").expect("ready");
    label.send_changes().await.expect("nothing changed");
    assert!(!label.is_set());
    fs::write(&b, "").expect("ready");
    for _ in 0..3 {
        label.send_changes().await.expect("sent once");
    }
    assert!(label.is_set());
    fs::remove_file(&a).expect("removed");
    label.end().await;
    assert!(!label.is_set());
    assert_eq!(bodies(&server, "good"), [UNSET, SET, UNSET]);
}

#[tokio::test]
async fn a_token_that_was_replaced_is_read_again() {
    let (dir, server) = (tempfile::tempdir().expect("a directory"), api_server());
    fs::write(dir.path().join("token"), "old").expect("token");
    fs::write(dir.path().join("a"), "").expect("ready");
    let label = Arc::new(label(dir.path(), &server, &["a"]));
    let refused = format!("{:#}", label.send_changes().await.expect_err("refused"));
    assert!(refused.contains("403 Forbidden") && refused.contains("is forbidden"), "{refused}");
    assert!(!refused.contains("old"), "no token is shown: {refused}");
    assert_eq!(bodies(&server, "old"), [SET]);
    let tasks = tokio_util::task::TaskTracker::new();
    let running = Arc::clone(&label);
    let task = tasks.spawn(async move { running.run().await });
    fs::write(dir.path().join("token"), "good").expect("token");
    // The first call of the task may still have the old one: then it pauses.
    timeout(Duration::from_secs(20), async {
        while !label.is_set() {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .expect("the label is set");
    task.abort();
}

#[tokio::test]
async fn an_api_server_that_is_not_the_clusters_gets_no_token() {
    let (dir, server) = (tempfile::tempdir().expect("a directory"), api_server());
    fs::write(dir.path().join("token"), "good").expect("token");
    let label = label(dir.path(), &server, &["a"]);
    let stranger = tls::Authority::new("another cluster");
    fs::write(dir.path().join("ca.crt"), stranger.pem()).expect("the CA");
    label.send_changes().await.expect_err("no connection");
    assert!(server.requests().is_empty());
}

#[test]
fn addresses_of_api_servers() {
    let at = |host: Option<&str>| {
        let settings = NodeLabelSettings { node: "../x".into(), when: Vec::new(), account: PathBuf::new() };
        NodeLabel::new(settings, host.map(str::to_owned), Some("443".into()))
            .map(|label| label.url.to_string())
    };
    let path = "api/v1/nodes/..%2Fx?fieldManager=fletch-mount";
    assert_eq!(at(Some("10.0.0.1")).expect("usable"), format!("https://10.0.0.1/{path}"));
    assert_eq!(at(Some("fd00::1")).expect("usable"), format!("https://[fd00::1]/{path}"));
    assert!(at(None).expect_err("no pod").to_string().contains("KUBERNETES_SERVICE_HOST"));
}
