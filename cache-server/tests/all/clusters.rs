//! Tests the view of a server that is alone: its reply, its entity tag, and who may drain. Several servers
//! and a real etcd are in `tests/integration/cluster.rs`.

use crate::common::{Node, body, problem};
use fletch_api::{Cluster, Code, headers};
use fletch_core::Hash;
use reqwest::{Method, StatusCode};
use std::time::{Duration, Instant};

#[tokio::test]
async fn a_server_that_is_alone_is_its_only_member() {
    let node = Node::start(&["--cluster-id=srv-7"]).await;
    let reply = node.get("/v1/cluster").send().await.expect("answer");
    assert_eq!(reply.headers()[headers::VIEW], "1");
    let tag = reply.headers()["etag"].clone();
    let cluster: Cluster = serde_json::from_slice(&body(reply, StatusCode::OK).await).expect("JSON");
    let member = &cluster.members[0];
    assert_eq!((cluster.view, cluster.members.len()), (1, 1));
    assert_eq!((&*member.id, member.url.clone(), member.weight, member.up), ("srv-7", node.url(""), 1, true));

    let known = |path: &str| node.get(path).header("if-none-match", tag.clone()).send();
    assert_eq!(known("/v1/cluster").await.expect("answer").status(), StatusCode::NOT_MODIFIED);
    let older = node.get("/v1/cluster?after=0&wait_ms=9000").send().await.expect("answer");
    assert_eq!(older.status(), StatusCode::OK);
    // The server waits for a view that does not come, and then tells the one that it has.
    for path in ["/v1/cluster?after=1&wait_ms=300", "/v1/cluster?wait_ms=300"] {
        let asked = Instant::now();
        let reply = known(path).await.expect("answer");
        let is_after = path.contains("after");
        assert_eq!(reply.status(), if is_after { StatusCode::OK } else { StatusCode::NOT_MODIFIED });
        assert!(asked.elapsed() >= Duration::from_millis(300), "{path}: {:?}", asked.elapsed());
    }
    problem(node.get("/v1/cluster?after=x").send().await.expect("answer"), Code::BadRequest).await;
    let drained = node.json(Method::POST, "/v1/cluster/members/srv-7/drain", "{}").send().await;
    let told = problem(drained.expect("answer"), Code::Conflict).await;
    assert!(told.detail.contains("cluster.coordinator is embedded"), "{}", told.detail);
    // Every reply has the number of the view, also an error.
    let reply = node.get("/no/such/route").send().await.expect("answer");
    assert_eq!(
        (reply.status(), &reply.headers()[headers::VIEW]),
        (StatusCode::NOT_FOUND, &"1".parse().expect("text"))
    );
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_stop_ends_waits_for_another_view() {
    let node = Node::start(&[]).await;
    let waits = node.get("/v1/cluster?after=1&wait_ms=9000").send();
    let stops = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        node.running.stop.cancel();
    };
    let asked = Instant::now();
    let (reply, ()) = tokio::join!(waits, stops);
    assert_eq!(reply.expect("answer").status(), StatusCode::OK);
    assert!(asked.elapsed() < Duration::from_secs(4), "{:?}", asked.elapsed());
    node.running.stopped().await;
}

#[tokio::test]
async fn only_admins_drain() {
    let dir = tempfile::tempdir().expect("tempdir");
    let tokens = dir.path().join("tokens.toml");
    let hash = Hash::of(b"secret");
    std::fs::write(&tokens, format!("[[token]]\nhash = \"{hash}\"\ntenant = \"t\"\nrole = \"user\"\n"))
        .expect("write");
    let mut node = Node::start(&[&format!("--auth-tokens={}", tokens.display())]).await;
    node.sign("secret");
    let drained = node.json(Method::POST, "/v1/cluster/members/srv-7/drain", "{}").send().await;
    problem(drained.expect("answer"), Code::Forbidden).await;
    node.running.shutdown().await;
}
