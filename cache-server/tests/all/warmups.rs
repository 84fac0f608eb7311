//! Tests that warm-ups report what is cached, what they fetched, and what the cache could not keep.

use crate::common::{Node, Tree, body, content, index_bucket, problem};
use fletch_api::{Amount, Code, Evicted, StartWarmup, Warmup, WarmupState, Warmups};
use fletch_core::{DatasetName, Domain, Hash, StoreKey};
use fletch_store::disk::{DiskConfig, DiskEngine, Policy};
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use reqwest::{Method, StatusCode};
use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};
use tempfile::TempDir;

const CACHE: u64 = 64 << 20;

/// A server with an origin that counts requests, 40 small files and a file of three slices.
struct Site {
    node: Option<Node>,
    tree: Tree,
    emulator: OriginEmulator,
    args: Vec<String>,
    _settings: TempDir,
}

impl Site {
    async fn new(more: &[&str]) -> Self {
        let names: Vec<&'static str> = (0..40).map(|i| &*format!("f{i:02}").leak()).collect();
        let small = names.into_iter().zip(10..).map(|(n, seed)| (n, content(seed, 100_000)));
        Site::with_tree(Tree::new(small.chain([("large", content(1, 9 << 20))])), more).await
    }

    async fn with_tree(tree: Tree, more: &[&str]) -> Self {
        let emulator =
            OriginEmulator::start(EmulatorConfig::default(), Backing::Directory(tree.dir.path().to_owned()));
        let settings = tempfile::tempdir().expect("tempdir");
        let file = settings.path().join("f.toml");
        let text = format!(
            "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\nregion = \
                \"us-east-1\"\ncredentials = \"anonymous\"\n",
            emulator.uri(),
            emulator.endpoint()
        );
        fs::write(&file, text).expect("write");
        // Whatever else fills the disk of this machine.
        let mut args = vec![format!("--config={}", file.display()), "--cache-free-floor=0".to_owned()];
        args.extend(more.iter().map(|s| (*s).to_owned()));
        if !more.iter().any(|s| s.starts_with("--cache-size")) {
            args.push(format!("--cache-size={CACHE}"));
        }
        let refs: Vec<&str> = args.iter().map(String::as_str).collect();
        let node = Node::start(&refs).await;
        index_bucket(&tree, &emulator).await;
        node.register("d", &emulator.uri(), Some(&tree.uri())).await;
        Site { node: Some(node), tree, emulator, args, _settings: settings }
    }

    fn node(&self) -> &Node {
        self.node.as_ref().expect("it runs")
    }

    fn chunks(&self) -> u64 {
        40 + 3
    }

    async fn start(&self, check: bool, pin_s: u64) -> Warmup {
        let ask = StartWarmup { dataset: DatasetName::new("d").expect("name"), version: None, check, pin_s };
        let ask = serde_json::to_string(&ask).expect("json");
        let r = self.node().post("/v1/warmups", ask).send().await.expect("answer");
        let at = r.headers().get("location").cloned();
        let begun: Warmup = serde_json::from_slice(&body(r, StatusCode::ACCEPTED).await).expect("a warm-up");
        assert_eq!(at.expect("location"), format!("/v1/warmups/{}", begun.id));
        begun
    }

    async fn get(&self, id: &str) -> Warmup {
        let r = self.node().get(&format!("/v1/warmups/{id}")).send().await.expect("answer");
        serde_json::from_slice(&body(r, StatusCode::OK).await).expect("a warm-up")
    }

    async fn over(&self, id: &str) -> Warmup {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let now = self.get(id).await;
            if now.state.is_over() {
                return now;
            }
            assert!(Instant::now() < until, "never over: {now:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn warm(&self) -> Warmup {
        let begun = self.start(false, 0).await;
        self.over(&begun.id).await
    }

    async fn check(&self) -> Warmup {
        let begun = self.start(true, 0).await;
        self.over(&begun.id).await
    }

    /// Stops the server, changes its cache directory, and starts it again.
    async fn meanwhile(&mut self, happens: impl FnOnce(&Path)) {
        let Node { state, running, .. } = self.node.take().expect("it runs");
        running.shutdown().await;
        happens(&state.path().join("cache"));
        let args: Vec<&str> = self.args.iter().map(String::as_str).collect();
        self.node = Some(Node::start_in(state, &args).await);
        self.emulator.reset_counts();
    }

    async fn end(mut self) {
        self.node.take().expect("it runs").running.shutdown().await;
    }
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for e in fs::read_dir(dir).expect("dir") {
        let path = e.expect("entry").path();
        if path.is_dir() { out.extend(files(&path)) } else { out.push(path) }
    }
    out.sort();
    out
}

/// Returns where these bytes lie in a file of the cache.
fn find(dir: &Path, bytes: &[u8]) -> (PathBuf, usize) {
    let holds = |p: PathBuf| {
        let all = fs::read(&p).expect("read");
        all.windows(64).position(|w| w == &bytes[..64]).map(|at| (p, at))
    };
    files(dir).into_iter().find_map(holds).expect("it is in some slab")
}

#[tokio::test]
async fn a_warmup_brings_all_of_it_once_and_the_next_one_nothing() {
    let site = Site::new(&[]).await;
    assert_eq!(site.check().await.missing.chunks, site.chunks(), "nothing is there yet");
    site.emulator.reset_counts();
    let done = site.warm().await;
    assert_eq!((done.state, done.missing, done.error.clone()), (WarmupState::Done, Amount::default(), None));
    assert_eq!((done.fetched, done.total), (done.total, done.looked_at));
    assert_eq!(done.total.chunks, site.chunks());
    assert_eq!(site.emulator.counts().get, site.chunks());
    let again = site.warm().await;
    assert_eq!(
        (again.state, again.present, again.fetched),
        (WarmupState::Done, again.total, Amount::default())
    );
    assert_eq!(site.check().await.state, WarmupState::Done);
    // Readers get it from the cache.
    for (path, bytes) in &site.tree.files {
        let url = format!("/v1/versions/{}/files/{path}", done.root);
        let r = site.node().get(&url).send().await.expect("answer");
        assert_eq!(&body(r, StatusCode::OK).await, bytes);
    }
    assert_eq!(site.emulator.counts().get, site.chunks(), "each chunk once, for all of this");
    let r = site.node().get("/v1/warmups").send().await.expect("answer");
    let all: Warmups = serde_json::from_slice(&body(r, StatusCode::OK).await).expect("warm-ups");
    assert_eq!((all.warmups.len(), all.warmups[0].check), (4, true), "the last first");
    site.end().await;
}

#[tokio::test]
async fn what_went_missing_is_told_by_check_and_exactly_that_is_fetched_again() {
    let mut site = Site::new(&[]).await;
    assert_eq!(site.warm().await.state, WarmupState::Done);
    let (flipped, evicted) = (site.tree.files["f07"].clone(), site.tree.files["f23"].clone());
    type Harm<'a> = (&'a str, Box<dyn FnOnce(&Path)>, Option<u64>);
    let harms: Vec<Harm<'_>> = vec![
        ("nothing", Box::new(|_: &Path| {}), Some(0)),
        (
            "one flipped bit",
            Box::new(move |dir: &Path| {
                let (slab, at) = find(dir, &flipped);
                let mut all = fs::read(&slab).expect("read");
                all[at + 5000] ^= 4;
                fs::write(&slab, all).expect("write");
            }),
            Some(1),
        ),
        (
            "one evicted chunk",
            Box::new(move |dir: &Path| {
                let config = DiskConfig {
                    dir: dir.to_owned(),
                    size_max: CACHE,
                    free_floor: 0,
                    slab_bytes: None,
                    policy: Policy::Fletch,
                    seed: 1,
                    files_max: 8,
                    mount_memory: None,
                };
                let (tier, _) = DiskEngine::open(config, SystemTime::now()).expect("open");
                let key = StoreKey { domain: Domain::default_domain(), hash: Hash::of(&evicted) };
                assert!(tier.evict(&key), "it was there");
                tier.close().expect("closed");
            }),
            Some(1),
        ),
        (
            "a deleted slab",
            Box::new(|dir: &Path| {
                let slabs: Vec<_> = files(dir)
                    .into_iter()
                    .filter(|p| fs::metadata(p).expect("meta").len() > 200_000)
                    .collect();
                assert!(slabs.len() > 2, "{slabs:?}");
                fs::remove_file(&slabs[0]).expect("remove");
            }),
            None,
        ),
    ];
    for (what, happens, want) in harms {
        site.meanwhile(happens).await;
        let told = site.check().await;
        assert_eq!(site.emulator.counts().get, 0, "{what}: a check fetches nothing");
        let missing = told.missing.chunks;
        match want {
            Some(0) => assert_eq!((told.state, missing), (WarmupState::Done, 0), "{what}"),
            Some(n) => assert_eq!((told.state, missing), (WarmupState::Partial, n), "{what}"),
            None => assert!(
                told.state == WarmupState::Partial && (1..site.chunks()).contains(&missing),
                "{told:?}"
            ),
        }
        let again = site.warm().await;
        assert_eq!((again.state, again.fetched.chunks), (WarmupState::Done, missing), "{what}");
        assert_eq!(again.present.chunks, site.chunks() - missing, "{what}");
        assert_eq!(site.emulator.counts().get, missing, "{what}: exactly those");
        assert_eq!(site.check().await.state, WarmupState::Done, "{what}");
    }
    site.end().await;
}

#[tokio::test]
async fn what_does_not_fit_is_not_claimed() {
    let site = Site::new(&["--cache-size=16MiB", "--memory=64MiB"]).await;
    let big = Tree::new((0..30).map(|i| (&*format!("b{i:02}").leak(), content(100 + i, 1 << 20))));
    big.index();
    site.node().register("big", &big.uri(), None).await;
    let ask = r#"{"dataset":"big","pin_s":60}"#;
    let r = site.node().post("/v1/warmups", ask).send().await.expect("answer");
    let begun: Warmup = serde_json::from_slice(&body(r, StatusCode::ACCEPTED).await).expect("a warm-up");
    let told = site.over(&begun.id).await;
    assert_eq!(told.state, WarmupState::Partial, "{told:?}");
    assert!(told.refused.chunks > 0 && told.fetched.chunks > 0, "{told:?}");
    assert_eq!(told.looked_at, told.total);
    let there = told.total.chunks - told.missing.chunks;
    assert_eq!((told.fetched.chunks, told.refused.chunks), (there, told.missing.chunks), "{told:?}");
    let why = told.error.expect("a reason");
    assert!(why.hint.contains("cache.size"), "{why}");
    let r =
        site.node().post("/v1/warmups", r#"{"dataset":"big","check":true}"#).send().await.expect("answer");
    let begun: Warmup = serde_json::from_slice(&body(r, StatusCode::ACCEPTED).await).expect("a warm-up");
    let checked = site.over(&begun.id).await;
    assert_eq!((checked.state, checked.missing), (WarmupState::Partial, told.missing), "both count the same");
    // What it protects is given back when it is cancelled, also after it is over.
    assert_eq!(site.node().metric("fletch_warmup_pinned_chunks").await, there);
    let path = format!("/v1/warmups/{}", told.id);
    let r = site.node().ask(Method::DELETE, &path).send().await.expect("answer");
    assert_eq!(r.status(), StatusCode::ACCEPTED);
    let until = Instant::now() + Duration::from_secs(5);
    while site.node().metric("fletch_warmup_pinned_chunks").await > 0 {
        assert!(Instant::now() < until, "the lease does not end");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    site.end().await;
}

#[tokio::test]
async fn a_warmup_that_does_not_fit_fetches_only_what_is_kept() {
    // More chunks than one round of the append queue, so that many are fetched while others are written.
    let tree = Tree::new((0..300).map(|i| (&*format!("b{i:03}").leak(), content(100 + i, 100_000))));
    let site = Site::with_tree(tree, &["--cache-size=16MiB", "--memory=1GiB"]).await;
    site.emulator.reset_counts();
    let told = site.warm().await;
    assert_eq!(told.state, WarmupState::Partial, "{told:?}");
    let kept = told.total.chunks - told.missing.chunks;
    assert!(kept > 100, "{told:?}");
    assert_eq!((told.fetched.chunks, told.refused.chunks), (kept, told.missing.chunks), "{told:?}");
    assert_eq!(site.emulator.counts().get, kept, "nothing was fetched in vain");
    let why = told.error.expect("a reason");
    assert!(why.hint.contains("cache.size") && why.detail.contains("fits on the disk"), "{why}");
    assert_eq!(site.check().await.present.chunks, kept);
    site.end().await;
}

#[tokio::test]
async fn an_eviction_ends_what_is_protected_and_a_restart_forgets_ids_and_keeps_chunks() {
    let mut site = Site::new(&[]).await;
    let begun = site.start(false, 3600).await;
    let done = site.over(&begun.id).await;
    assert!(done.state == WarmupState::Done && done.pinned_until_ns.is_some());
    assert_eq!(site.node().metric("fletch_warmup_pinned_chunks").await, site.chunks());
    site.meanwhile(|_| {}).await;
    let gone = site.node().get(&format!("/v1/warmups/{}", begun.id)).send().await.expect("answer");
    problem(gone, Code::NotFound).await;
    assert_eq!(site.check().await.state, WarmupState::Done, "what it brought is kept");
    let begun = site.start(false, 3600).await;
    site.over(&begun.id).await;
    let r = site.node().ask(Method::DELETE, "/v1/datasets/d/chunks").send().await.expect("answer");
    let evicted: Evicted = serde_json::from_slice(&body(r, StatusCode::OK).await).expect("evicted");
    assert_eq!(evicted.chunks, site.chunks());
    let told = site.check().await;
    assert_eq!((told.state, told.missing.chunks), (WarmupState::Partial, site.chunks()));
    for path in ["/v1/datasets/none/chunks", "/v1/warmups/none"] {
        problem(site.node().ask(Method::DELETE, path).send().await.expect("answer"), Code::NotFound).await;
    }
    let r = site.node().post("/v1/warmups", r#"{"dataset":"none"}"#).send().await.expect("answer");
    problem(r, Code::NotFound).await;
    let r =
        site.node().post("/v1/warmups", r#"{"dataset":"d","pin_s":99999999}"#).send().await.expect("answer");
    problem(r, Code::BadRequest).await;
    site.end().await;
}

#[tokio::test]
async fn an_origin_that_fails_is_told_and_what_came_is_kept() {
    let site = Site::new(&["--io-timeout=2s"]).await;
    let missing: Vec<PathBuf> = ["f03", "f30"].iter().map(|f| site.tree.path(f)).collect();
    for p in &missing {
        fs::rename(p, p.with_extension("away")).expect("hide");
    }
    let told = site.warm().await;
    assert_eq!(
        (told.state, told.failed.chunks, told.missing.chunks),
        (WarmupState::Failed, 2, 2),
        "{told:?}"
    );
    assert_eq!(told.error.as_ref().expect("why").code, Code::OriginMissing);
    assert_eq!(told.fetched.chunks, site.chunks() - 2);
    for p in &missing {
        fs::rename(p.with_extension("away"), p).expect("back");
    }
    let again = site.warm().await;
    assert_eq!((again.state, again.fetched.chunks), (WarmupState::Done, 2));
    site.end().await;
}

#[tokio::test]
async fn the_same_again_is_the_one_that_is_under_way_and_cancelling_keeps_what_came() {
    let site = Site::new(&[]).await;
    site.emulator.set_fault("f2", fletch_testkit::Fault::Stall, None);
    let one = site.start(false, 0).await;
    let until = Instant::now() + Duration::from_secs(10);
    while site.get(&one.id).await.fetched.chunks < 10 {
        assert!(Instant::now() < until, "nothing comes");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(site.start(false, 0).await.id, one.id);
    assert_ne!(site.start(true, 0).await.id, one.id, "a check is another thing");
    let r = site.node().ask(Method::DELETE, &format!("/v1/warmups/{}", one.id)).send().await.expect("answer");
    assert_eq!(r.status(), StatusCode::ACCEPTED);
    let over = site.over(&one.id).await;
    assert_eq!(over.state, WarmupState::Cancelled);
    site.emulator.clear_faults();
    let rest = site.warm().await;
    assert_eq!(rest.state, WarmupState::Done, "{rest:?}");
    assert!(rest.present.chunks >= 10, "{rest:?}");
    site.end().await;
}

#[tokio::test]
async fn of_several_layouts_the_one_that_readers_are_given_is_warmed() {
    use fletch_core::manifest::LayoutParams;
    let tree = Tree::new([("a", content(1, 5 << 20)), ("b", content(2, 300))]);
    let node = Node::start(&["--cache-size=64MiB", "--cache-free-floor=0"]).await;
    let first = tree.index();
    node.register("d", &tree.uri(), None).await;
    // Open in the first layout, then the tag names another one of the same root.
    node.resolve("d", "latest").await;
    let file = format!("/v1/versions/{}/files/b", first.root());
    body(node.get(&file).send().await.expect("answer"), StatusCode::OK).await;
    let small = LayoutParams { slice_bytes: 1 << 20, ..LayoutParams::INDEX };
    let second = tree.index_to(tree.dir.path(), small);
    assert_eq!(first.root(), second.root());
    let given = node.resolve("d", "latest").await;
    assert_eq!(given.layout, second.written.layout);
    let r = node.post("/v1/warmups", r#"{"dataset":"d"}"#).send().await.expect("answer");
    let begun: Warmup = serde_json::from_slice(&body(r, StatusCode::ACCEPTED).await).expect("a warm-up");
    assert_eq!((begun.layout, begun.total.chunks), (given.layout, 6));
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let r = node.get(&format!("/v1/warmups/{}", begun.id)).send().await.expect("answer");
        let now: Warmup = serde_json::from_slice(&body(r, StatusCode::OK).await).expect("a warm-up");
        if now.state.is_over() {
            assert_eq!((now.state, now.missing), (WarmupState::Done, Amount::default()), "{now:?}");
            break;
        }
        assert!(Instant::now() < until, "{now:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let slice = Hash::of(&tree.files["a"][..1 << 20]);
    let r = node.get(&fletch_api::routes::chunk(first.root(), slice)).send().await.expect("answer");
    assert_eq!(r.headers()["cache-status"], "fletch; hit");
    node.running.shutdown().await;
}
