//! Tests I7: a dataset of one domain does not exist for another, whatever the role and the route.

use crate::common::{Indexed, Node, Tree, body, content, problem};
use fletch_api::{Code, routes};
use fletch_core::{Hash, LayoutId, Root};
use reqwest::{Method, RequestBuilder, StatusCode};
use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// A server with two domains, `a` and `b`. Each may read below a directory of its own.
struct Two {
    node: Node,
    dir: TempDir,
}

impl Two {
    async fn new(more: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("tempdir");
        let tokens = dir.path().join("tokens.toml");
        let line = |t: &str| format!("[[token]]\nhash = \"{}\"\ntenant = \"{t}\"\n", Hash::of(t.as_bytes()));
        let admin = format!("[[token]]\nhash = \"{}\"\ntenant = \"z\"\nrole = \"admin\"\n", Hash::of(b"z"));
        fs::write(&tokens, line("a") + &line("b") + &admin).expect("write");
        fs::create_dir(dir.path().join("data")).expect("mkdir");
        let mut args = vec![
            format!("--auth-tokens={}", tokens.display()),
            format!("--local-dirs={}=*", dir.path().join("data").display()),
        ];
        args.extend(more.iter().map(|s| (*s).to_owned()));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        Two { node: Node::start(&args).await, dir }
    }

    /// A tree below the directory that a domain may read.
    fn tree(&self, files: impl IntoIterator<Item = (&'static str, Vec<u8>)>) -> Tree {
        Tree::new_in(&self.dir.path().join("data"), files)
    }

    fn ask(&self, token: &str, method: Method, path: &str) -> RequestBuilder {
        self.node.ask(method, path).bearer_auth(token).header("content-type", "application/json")
    }

    async fn register(&self, token: &str, name: &str, uri: &str) -> reqwest::Response {
        let what = serde_json::json!({"name": name, "uri": uri}).to_string();
        self.ask(token, Method::POST, "/v1/datasets").body(what).send().await.expect("answer")
    }

    async fn metric(&self, begins: &str) -> u64 {
        let r = self.ask("z", Method::GET, "/metrics").send().await.expect("answer");
        let text = r.text().await.expect("text");
        let line = text.lines().find(|l| l.starts_with(begins)).unwrap_or_else(|| panic!("{begins}"));
        line.rsplit(' ').next().expect("value").parse().expect("a number")
    }
}

/// Returns every request that names a version, as (method, path, body).
fn ways(root: Root, layout: LayoutId, chunk: Hash) -> Vec<(Method, String, String)> {
    let get = |p: String| (Method::GET, p, String::new());
    vec![
        get(routes::chunk(root, chunk)),
        (Method::HEAD, routes::chunk(root, chunk), String::new()),
        get(routes::manifest(root)),
        get(routes::entries(root)),
        get(routes::layout(root, layout)),
        get(routes::placement(root, layout)),
        get(format!("/v1/versions/{root}/files/a.bin")),
        (
            Method::POST,
            routes::batch(root),
            format!(
                "{{\"items\":[{{\"chunk\":{{\"hash\":\"{chunk}\"}}}},\
                  {{\"path\":\"a.bin\"}},{{\"ordinal\":0}}]}}"
            ),
        ),
        get(format!("/v1/datasets/secret/versions/{root}")),
    ]
}

#[tokio::test]
async fn i7_foreign_and_absent_are_one_answer_without_a_look_at_the_others_origin() {
    let two = Two::new(&[]).await;
    let secret = two.tree([("a.bin", content(1, 5000)), ("b.bin", content(2, 300))]);
    let Indexed { written } = secret.index();
    let mine = two.tree([("mine", content(3, 10))]);
    mine.index();
    assert_eq!(two.register("a", "secret", &secret.uri()).await.status(), 201);
    assert_eq!(two.register("b", "mine", &mine.uri()).await.status(), 201);
    let chunk = Hash::of(&secret.files["a.bin"]);
    // It is open, in memory and hot where it belongs.
    for (method, path, sent) in ways(written.root, written.layout, chunk) {
        let r = two.ask("a", method, &path).body(sent).send().await.expect("answer");
        assert_eq!(r.status(), StatusCode::OK, "{path}");
    }
    let nowhere =
        (Root(Hash::of(b"no such root")), LayoutId(Hash::of(b"no such layout")), Hash::of(b"no such chunk"));
    let of = async |root: Root, layout: LayoutId, chunk: Hash| {
        let mut seen = Vec::new();
        for (method, path, sent) in ways(root, layout, chunk) {
            let before = two.metric("fletch_origin_requests_total").await;
            let reads = two.metric("fletch_chunk_reads_total{tier=\"memory\"}").await;
            let r = two.ask("b", method, &path).body(sent).send().await.expect("answer");
            let mut head: Vec<_> = r
                .headers()
                .iter()
                .filter(|(n, _)| *n != "date" && *n != "x-request-id")
                .map(|(n, v)| format!("{n}: {v:?}"))
                .collect();
            head.sort();
            let status = r.status().as_u16();
            let text = r.text().await.expect("text");
            let asked = two.metric("fletch_origin_requests_total").await - before;
            assert_eq!(
                two.metric("fletch_chunk_reads_total{tier=\"memory\"}").await,
                reads,
                "no look into the cache"
            );
            seen.push((status, head, text, asked));
        }
        seen
    };
    let (foreign, absent) =
        (of(written.root, written.layout, chunk).await, of(nowhere.0, nowhere.1, nowhere.2).await);
    assert!(foreign.iter().all(|(status, ..)| *status == 404), "{foreign:?}");
    assert_eq!(foreign, absent);
    // What was asked of origins was asked of b's own, and as often for both.
    let second = two.tree([("a.bin", content(9, 700))]);
    let Indexed { written } = second.index();
    two.register("a", "second", &second.uri()).await;
    let chunk = Hash::of(&second.files["a.bin"]);
    let hot = two.ask("a", Method::GET, &routes::chunk(written.root, chunk)).send().await.expect("answer");
    assert_eq!(hot.status(), StatusCode::OK);
    let moved = second.dir.path().with_extension("moved");
    fs::rename(second.dir.path(), &moved).expect("hide a's files");
    let other = Root(Hash::of(b"another"));
    assert_eq!(of(written.root, written.layout, chunk).await, of(other, nowhere.1, nowhere.2).await);
    fs::rename(&moved, second.dir.path()).expect("back");
    // Names are the domain's own.
    let get =
        async |token: &str| two.ask(token, Method::GET, "/v1/datasets/secret").send().await.expect("answer");
    assert_eq!(get("a").await.status(), StatusCode::OK);
    let mut told = problem(get("b").await, Code::NotFound).await;
    told.detail = told.detail.replace("secret", "never");
    let never = two.ask("b", Method::GET, "/v1/datasets/never").send().await.expect("answer");
    assert_eq!(told, problem(never, Code::NotFound).await, "the answers differ in the name alone");
    assert_eq!(two.register("b", "secret", &mine.uri()).await.status(), 201, "the name is free in b");
    let list =
        two.ask("b", Method::GET, "/v1/datasets").send().await.expect("answer").text().await.expect("text");
    assert!(!list.contains(&secret.uri()), "{list}");
    two.node.running.shutdown().await;
}

#[tokio::test]
async fn i7_chunks_that_another_domain_cached_are_no_hit() {
    let two = Two::new(&[]).await;
    let files = || [("a.bin", content(1, 5000))];
    // The same content at two places: one root, one chunk, two owners.
    let (of_a, of_b) = (two.tree(files()), two.tree(files()));
    let root = of_a.index().root();
    assert_eq!(root, of_b.index().root());
    two.register("a", "d", &of_a.uri()).await;
    two.register("b", "d", &of_b.uri()).await;
    let path = routes::chunk(root, Hash::of(&of_a.files["a.bin"]));
    let status = async |token: &str, method: Method| {
        let r = two.ask(token, method, &path).send().await.expect("answer");
        r.headers()["cache-status"].to_str().expect("text").to_owned()
    };
    assert_eq!(status("a", Method::GET).await, "fletch; fwd=miss; stored");
    assert_eq!(status("a", Method::GET).await, "fletch; hit");
    assert_eq!(status("b", Method::HEAD).await, "fletch; fwd=miss", "not even HEAD tells");
    // b's own fill is from b's own files: without them there is nothing, hot as it is in a.
    let hidden = of_b.path("a.bin").with_extension("hidden");
    fs::rename(of_b.path("a.bin"), &hidden).expect("hide");
    let r = two.ask("b", Method::GET, &path).send().await.expect("answer");
    problem(r, Code::OriginMissing).await;
    fs::rename(&hidden, of_b.path("a.bin")).expect("back");
    assert_eq!(status("b", Method::GET).await, "fletch; fwd=miss; stored");
    two.node.running.shutdown().await;
}

#[tokio::test]
async fn what_no_domain_may_read_is_refused_by_name_and_with_the_reason() {
    let two = Two::new(&[]).await;
    let data = two.dir.path().join("data");
    fs::create_dir(data.join("set")).expect("mkdir");
    std::os::unix::fs::symlink("/etc", data.join("etc")).expect("symlink");
    let text = |p: PathBuf| p.display().to_string();
    let refused = [
        ("file:///etc".to_owned(), "local.dirs"),
        ("/etc".to_owned(), "local.dirs"),
        ("file:///".to_owned(), "local.dirs"),
        (text(data.join("etc")), "local.dirs"),
        (text(data.join("absent")), "local.dirs"),
        ("http://169.254.169.254/latest/meta-data/".to_owned(), "metadata"),
        ("http://metadata.google.internal/x".to_owned(), "metadata"),
        ("http://[fe80::1]/x".to_owned(), "metadata"),
        ("s3://anything/x".to_owned(), "[[origin]]"),
    ];
    for (uri, why) in refused {
        let p = problem(two.register("a", "d", &uri).await, Code::UriNotAllowed).await;
        assert!(p.detail.contains(why), "{uri}: {p}");
    }
    for uri in ["http://localhost/x", "http://127.0.0.1:1/x", "http://10.0.0.1/x", "https://example.com/x"] {
        let r = two.register("a", "d", uri).await;
        assert!(matches!(r.status().as_u16(), 400 | 403), "{uri}: {}", r.text().await.expect("text"));
    }
    assert_eq!(two.register("a", "d", &text(data.join("set"))).await.status(), 201);
    two.node.running.shutdown().await;
}

#[tokio::test]
async fn a_directory_that_becomes_a_link_after_it_was_registered_is_not_followed_out() {
    let two = Two::new(&[]).await;
    let outside = Tree::new([("a.bin", content(1, 5000))]);
    let root = outside.index().root();
    let inside = two.tree([("a.bin", content(1, 5000))]);
    inside.index();
    assert_eq!(two.register("a", "d", &inside.uri()).await.status(), 201);
    let at = inside.dir.path().to_owned();
    fs::rename(&at, at.with_extension("moved")).expect("move");
    std::os::unix::fs::symlink(outside.dir.path(), &at).expect("symlink");
    let file = format!("/v1/versions/{root}/files/a.bin");
    let r = two.ask("a", Method::GET, &file).send().await.expect("answer");
    let told = problem(r, Code::OriginDenied).await;
    assert!(!told.detail.contains(&outside.uri()), "{told}");
    fs::remove_file(&at).expect("remove");
    fs::rename(at.with_extension("moved"), &at).expect("back");
    let r = two.ask("a", Method::GET, &file).send().await.expect("answer");
    assert_eq!(body(r, StatusCode::OK).await, inside.files["a.bin"]);
    two.node.running.shutdown().await;
}

#[tokio::test]
async fn unregistering_refuses_at_once_for_that_domain_only() {
    let two = Two::new(&[]).await;
    let tree = two.tree([("a.bin", content(1, 5000))]);
    let Indexed { written } = tree.index();
    let chunk = Hash::of(&tree.files["a.bin"]);
    for token in ["a", "b"] {
        assert_eq!(two.register(token, "secret", &tree.uri()).await.status(), 201);
    }
    let statuses = async |token: &str| {
        let mut all = Vec::new();
        for (method, path, sent) in ways(written.root, written.layout, chunk) {
            all.push(
                two.ask(token, method, &path).body(sent).send().await.expect("answer").status().as_u16(),
            );
        }
        all.dedup();
        all
    };
    assert_eq!((statuses("a").await, statuses("b").await), (vec![200], vec![200]));
    let gone = two.ask("a", Method::DELETE, "/v1/datasets/secret").send().await.expect("answer");
    assert_eq!(gone.status(), StatusCode::NO_CONTENT);
    assert_eq!(
        (statuses("a").await, statuses("b").await),
        (vec![404], vec![200]),
        "hot in memory, and refused"
    );
    // Through another registration of the domain it is granted again.
    assert_eq!(two.register("a", "other", &tree.uri()).await.status(), 201);
    let path = routes::chunk(written.root, chunk);
    assert_eq!(two.ask("a", Method::GET, &path).send().await.expect("answer").status(), StatusCode::OK);
    two.node.running.shutdown().await;
}

#[tokio::test]
async fn whoever_waits_at_a_grant_is_told_when_it_ends_and_nobody_else() {
    let two = Two::new(&[]).await;
    let tree = two.tree([("a.bin", content(1, 5000))]);
    let root = tree.index().root();
    for token in ["a", "b"] {
        assert_eq!(two.register(token, "d", &tree.uri()).await.status(), 201);
    }
    let ask = async |token: &str, wait_ms: u64| {
        let begun = Instant::now();
        let r = two.ask(token, Method::GET, &routes::access(root, wait_ms)).send().await.expect("answer");
        (r.status().as_u16(), begun.elapsed())
    };
    let (status, took) = ask("a", 300).await;
    assert!(status == 204 && took >= Duration::from_millis(300), "held back: {took:?}");
    assert_eq!(ask("z", 10_000).await.0, 404, "at once where there is no grant");
    let unregister = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        two.ask("a", Method::DELETE, "/v1/datasets/d").send().await.expect("answer").status().as_u16()
    };
    let (of_a, of_b, gone) = tokio::join!(ask("a", 10_000), ask("b", 1000), unregister);
    assert_eq!((of_a.0, of_b.0, gone), (404, 204, 204));
    assert!(of_a.1 < Duration::from_secs(5), "{:?}", of_a.1);
    // A token that is gone ends a grant, too.
    let tokens = two.dir.path().join("tokens.toml");
    let revoke = async {
        let text = fs::read_to_string(&tokens)
            .expect("tokens")
            .replace(&Hash::of(b"b").to_string(), &Hash::of(b"c").to_string());
        fs::write(tokens.with_extension("part"), text).expect("write");
        fs::rename(tokens.with_extension("part"), &tokens).expect("rename");
    };
    let (of_b, ()) = tokio::join!(ask("b", 10_000), revoke);
    assert!(of_b.0 == 401 && of_b.1 < Duration::from_secs(5), "{of_b:?}");
    problem(
        two.ask("c", Method::GET, &format!("/v1/versions/{root}/access?wait_ms=x"))
            .send()
            .await
            .expect("answer"),
        Code::BadRequest,
    )
    .await;
    // A server that stops does not wait for whoever waits.
    let waiting = ask("c", 10_000);
    let Two { node, .. } = &two;
    let stop = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        node.running.stop.cancel();
    };
    let (last, ()) = tokio::join!(waiting, stop);
    assert!(last.0 == 204 && last.1 < Duration::from_secs(2), "{last:?}");
    two.node.running.stopped().await;
}

#[tokio::test]
async fn a_warmup_that_a_quota_cuts_short_names_the_quota_and_not_the_size_of_the_cache() {
    let two = Two::new(&["--cache-size=64MiB", "--cache-free-floor=0"]).await;
    let tokens = two.dir.path().join("tokens.toml");
    let text = fs::read_to_string(&tokens).expect("tokens");
    let quota = "[[tenant]]\nname = \"a\"\nresident = \"8MiB\"\n";
    fs::write(tokens.with_extension("part"), text + quota).expect("write");
    fs::rename(tokens.with_extension("part"), &tokens).expect("rename");
    let until = Instant::now() + Duration::from_secs(10);
    let line = "fletch_quota_bytes{of=\"resident\",tenant=\"a\"} 8388608";
    let page = async || {
        two.ask("z", Method::GET, "/metrics").send().await.expect("answer").text().await.expect("text")
    };
    while !page().await.contains(line) {
        assert!(Instant::now() < until, "the quota is not in force");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let names = (0..20u32).map(|i| &*format!("f{i:02}").leak());
    let tree = two.tree(names.zip(0..).map(|(n, i)| (n, content(i, 1_000_000))));
    tree.index();
    for token in ["a", "b"] {
        assert_eq!(two.register(token, "d", &tree.uri()).await.status(), 201);
        let r = two.ask(token, Method::POST, "/v1/warmups").body(r#"{"dataset":"d"}"#).send().await;
        let r = body(r.expect("answer"), StatusCode::ACCEPTED).await;
        let begun: fletch_api::Warmup = serde_json::from_slice(&r).expect("a warm-up");
        let until = Instant::now() + Duration::from_secs(30);
        let told = loop {
            let r = two.ask(token, Method::GET, &format!("/v1/warmups/{}", begun.id)).send().await;
            let r = body(r.expect("answer"), StatusCode::OK).await;
            let now: fletch_api::Warmup = serde_json::from_slice(&r).expect("a warm-up");
            if now.state.is_over() {
                break now;
            }
            assert!(Instant::now() < until, "never over: {now:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        if token == "b" {
            assert_eq!((told.missing.chunks, told.error), (0, None), "no quota, and it fits");
            break;
        }
        let kept = told.total.chunks - told.missing.chunks;
        assert!((5..=8).contains(&kept), "{told:?}");
        assert_eq!((told.fetched.chunks, told.refused.chunks), (kept, told.missing.chunks), "{told:?}");
        let why = told.error.expect("a reason");
        assert_eq!(why.code, Code::QuotaExceeded);
        assert!(why.detail.contains("`resident`") && why.hint.contains("quota"), "{why}");
        assert!(!why.hint.contains("cache.size"), "{why}");
    }
    two.node.running.shutdown().await;
}

#[tokio::test]
async fn a_quota_is_enforced_when_registering_and_when_a_dataset_grows() {
    let quota = |bytes: u64| format!("[[tenant]]\nname = \"a\"\nregistered = {bytes}\nresident = \"1GiB\"\n");
    let two = Two::new(&[]).await;
    let tokens = two.dir.path().join("tokens.toml");
    let text = fs::read_to_string(&tokens).expect("tokens");
    let give = async |bytes: u64| {
        fs::write(tokens.with_extension("part"), text.clone() + &quota(bytes)).expect("write");
        fs::rename(tokens.with_extension("part"), &tokens).expect("rename");
        let until = Instant::now() + Duration::from_secs(10);
        let line = format!("fletch_quota_bytes{{of=\"registered\",tenant=\"a\"}} {bytes}");
        let page = async || {
            two.ask("z", Method::GET, "/metrics").send().await.expect("answer").text().await.expect("text")
        };
        while !page().await.contains(&line) {
            assert!(Instant::now() < until, "the quota is not in force");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    give(10_000).await;
    let (mut first, second) = (two.tree([("a", content(1, 6000))]), two.tree([("a", content(2, 5000))]));
    let old = first.index().root();
    second.index();
    assert_eq!(two.register("a", "first", &first.uri()).await.status(), 201);
    let told = problem(two.register("a", "second", &second.uri()).await, Code::QuotaExceeded).await;
    assert!(told.detail.contains("6000 of 10000 bytes") && told.detail.contains("would add 5000"), "{told}");
    assert_eq!(
        two.register("b", "second", &second.uri()).await.status(),
        201,
        "another tenant's bound is its own"
    );
    assert_eq!(two.metric("fletch_quota_used_bytes{of=\"registered\",tenant=\"a\"}").await, 6000);
    // It grows beyond: the new version is refused by name and by root, the old one is still served.
    first.files.insert("b".into(), content(3, 9000));
    fs::write(first.path("b"), &first.files["b"]).expect("write");
    let new = first.index().root();
    for path in ["/v1/datasets/first/versions/latest".to_owned(), routes::manifest(new)] {
        problem(two.ask("a", Method::GET, &path).send().await.expect("answer"), Code::QuotaExceeded).await;
    }
    let r = two.ask("a", Method::GET, &format!("/v1/versions/{old}/files/a")).send().await.expect("answer");
    assert_eq!(body(r, StatusCode::OK).await, first.files["a"]);
    give(20_000).await;
    let r = two.ask("a", Method::GET, &routes::manifest(new)).send().await.expect("answer");
    assert_eq!(r.status(), StatusCode::OK);
    assert_eq!(two.metric("fletch_quota_used_bytes{of=\"registered\",tenant=\"a\"}").await, 15_000);
    two.node.running.shutdown().await;
}

/// Returns the code of a source file, without its tests and comments.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).expect("source");
    let text = text.split("#[cfg(test)]").next().unwrap_or("");
    text.lines().map(|l| l.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
}

#[test]
fn i7_by_structure_there_is_one_way_to_a_version_and_one_answer_when_there_is_none() {
    let http = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/http");
    let mut ways_in = Vec::new();
    let mut answers = Vec::new();
    for entry in walk(&http) {
        let (name, text) = (entry.strip_prefix(&http).expect("below").display().to_string(), code(&entry));
        let count = |what: &str| text.matches(what).count();
        // Only `access` asks which versions there are, and it gives the answer of `versions` unchanged.
        if count(".sources(") > 0 {
            ways_in.push((name.clone(), count(".sources(")));
        }
        if count("VersionError::NotFound") > 0 {
            answers.push((name.clone(), count("VersionError::NotFound")));
        }
        // The code itself is used for the route that does not exist; for a file of the admin page and a
        // runbook, which hold no data; for a member of the cluster, which only an admin names; for a dataset,
        // a root and a tag that the caller's own domain does not have; for the listing and the sealing of a
        // dataset of it that there were not; and for an S3 door that is off. Nowhere else.
        let uses = match name.as_str() {
            "mod.rs" => 1,
            "datasets.rs" => 4,
            "drafts.rs" => 2,
            "page.rs" => 2,
            "cluster.rs" => 1,
            "s3_credentials.rs" => 1,
            _ => 0,
        };
        assert_eq!(count("Code::NotFound"), uses, "{name}");
        for of_a_version in ["chunks.rs", "files.rs", "batch.rs", "tables.rs", "peers.rs"] {
            if name == of_a_version {
                let handlers = count("parse_param(&root)?");
                assert!(handlers > 0, "{name}: no handler reads a root");
                assert_eq!(count("access(&"), handlers, "{name}: every root goes through access");
            }
        }
    }
    assert_eq!(ways_in, [("access.rs".to_owned(), 1)]);
    // `datasets.rs` gives the error of a version of one's own dataset a name and a next step.
    assert_eq!(answers, [("datasets.rs".to_owned(), 2), ("error.rs".to_owned(), 1)]);
}

#[test]
fn i7_by_structure_the_s3_door_opens_versions_in_one_place_by_the_access_check() {
    let door = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/s3");
    let mut opens = Vec::new();
    for entry in walk(&door) {
        let (name, text) = (entry.strip_prefix(&door).expect("below").display().to_string(), code(&entry));
        let ways = [".resolve(", ".resolve_recent_tag(", ".resolve_tag(", ".sources(", ".open_source("];
        let ways: usize = ways.iter().map(|way| text.matches(way).count()).sum();
        if ways > 0 {
            opens.push((name.clone(), ways, text.matches("access(server").count()));
        }
        let names_the_error = text.matches("S3Code::NoSuchKey").count();
        assert_eq!(
            names_the_error,
            usize::from(name == "error.rs"),
            "{name}: one error for all that is absent"
        );
    }
    assert_eq!(opens, [("dataset.rs".to_owned(), 3, 1)]);
}

fn walk(dir: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for e in fs::read_dir(dir).expect("dir") {
        let path = e.expect("entry").path();
        if path.is_dir() { out.extend(walk(&path)) } else { out.push(path) }
    }
    out.sort();
    out
}
