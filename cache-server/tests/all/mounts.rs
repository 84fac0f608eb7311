//! Tests the announcements of mounts, and where a server wants version tables to be written.

use crate::common::{Node, Tree, body, problem, settings};
use fletch_api::{Code, Info, Mounts};
use fletch_core::Hash;
use reqwest::{Method, RequestBuilder, StatusCode};

fn announcement(dir: &str) -> String {
    let root = Hash::of(b"root").to_string();
    serde_json::json!({"dataset": "d", "root": root, "dir": dir, "host": "node7", "pid": 7, "job": "j",
        "version": "latest", "a_later_field": 1})
    .to_string()
}

async fn dirs(r: RequestBuilder) -> Vec<String> {
    let text = body(r.send().await.expect("answer"), StatusCode::OK).await;
    let listed: Mounts = serde_json::from_slice(&text).expect("mounts");
    listed.mounts.into_iter().map(|m| m.announced.dir).collect()
}

async fn info(r: RequestBuilder) -> Info {
    let text = body(r.send().await.expect("answer"), StatusCode::OK).await;
    serde_json::from_slice(&text).expect("info")
}

fn tokens(dir: &std::path::Path) -> String {
    let line = |token: &str, tenant: &str, role: &str| {
        let hash = Hash::of(token.as_bytes());
        format!("[[token]]\nhash = \"{hash}\"\ntenant = \"{tenant}\"\nrole = \"{role}\"\n")
    };
    let file = dir.join("tokens.toml");
    let all = [("r", "t", "reader"), ("o", "o", "reader"), ("a", "t", "admin"), ("m", "t", "monitor")];
    let text: String = all.iter().map(|(token, tenant, role)| line(token, tenant, role)).collect();
    std::fs::write(&file, text).expect("write");
    format!("--auth-tokens={}", file.display())
}

#[tokio::test]
async fn a_reader_announces_lists_and_forgets_its_own_mounts_only() {
    let dir = tempfile::tempdir().expect("tempdir");
    let node = Node::start(&[&tokens(dir.path())]).await;
    let put = |token: &str, id: &str, dir: &str| {
        node.json(Method::PUT, &format!("/v1/mounts/{id}"), announcement(dir)).bearer_auth(token).send()
    };
    let list = |token: &str| dirs(node.get("/v1/mounts").bearer_auth(token));
    for (token, id, dir) in [("r", "m1", "/x"), ("r", "m2", "/y"), ("o", "m1", "/z"), ("r", "m1", "/w")] {
        assert_eq!(put(token, id, dir).await.expect("answer").status(), 204);
    }
    assert_eq!((list("r").await, list("o").await), (vec!["/w".into(), "/y".into()], vec!["/z".to_owned()]));
    assert_eq!(list("a").await.len(), 3, "an admin sees all");
    for (token, id) in [("o", "m2"), ("o", "none"), ("r", "m2")] {
        let r = node.ask(Method::DELETE, &format!("/v1/mounts/{id}")).bearer_auth(token);
        assert_eq!(r.send().await.expect("answer").status(), 204, "one answer for foreign and absent");
    }
    assert_eq!((list("r").await, list("o").await), (vec!["/w".to_owned()], vec!["/z".to_owned()]));
    problem(put("m", "m1", "/x").await.expect("answer"), Code::Forbidden).await;
    for (id, dir) in [("a%2Fb", "/x".to_owned()), ("m1", "x".repeat(5_000))] {
        problem(put("r", id, &dir).await.expect("answer"), Code::BadRequest).await;
    }
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_server_says_where_tables_go_and_takes_them_from_there() {
    let tree = Tree::usual();
    let allowed = format!("--local-dirs={}", tree.uri());
    let node = Node::start(&[&allowed]).await;
    let tables = node.state.path().join("state/tables/d-1");
    let publish = info(node.get("/v1/info")).await.publish.expect("a place");
    assert_eq!(publish.uri, format!("file://{}", tables.parent().expect("above").display()));
    std::fs::create_dir_all(&tables).expect("mkdir");
    tree.index_plain(&tables);
    node.register("d", &tree.uri(), Some(&tables.display().to_string())).await;
    node.resolve("d", "latest").await;
    node.running.shutdown().await;

    let dir = tempfile::tempdir().expect("tempdir");
    let node = Node::start(&[&tokens(dir.path())]).await;
    assert_eq!(info(node.get("/v1/info").bearer_auth("a")).await.publish, None, "domains share no directory");
    node.running.shutdown().await;

    let node = Node::start(&[&tokens(dir.path()), "--publish-uri=/shared/tables"]).await;
    let publish = info(node.get("/v1/info").bearer_auth("r")).await.publish.expect("a place");
    assert_eq!(publish.uri, "file:///shared/tables");
    node.running.shutdown().await;

    for (uri, says) in [("s3://bucket/tables", "below no [[origin]]"), ("tables", "relative path")] {
        let told = settings(dir.path(), &[&format!("--publish-uri={uri}")]).expect_err("a fault");
        assert!(told.contains(says), "{told}");
    }
}
