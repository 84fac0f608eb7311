//! The admin page in a real browser, over a real server with datasets, readers and jobs.
//!
//! `make accept-page` also looks at a job that stands still, at an origin that fails, and at 1,000 jobs; with
//! `FLETCH_PAGE_FIGURES=DIR` it writes pictures.

use fletch_api::{Ack, OrderKind, PlanSpec, StartJob, Visitation, WorldSpec};
use fletch_client::{
    Client, ClientConfig, Endpoint,
    epochs::{JobHandle, Next},
};
use fletch_core::plan::Tail;
use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};
use fletch_tests::{
    bins::{command, repo, run, stdout},
    browser::{look, modules},
    fixture::{Site, index},
    prometheus::Prometheus,
    require::{Need, have},
    watch::until,
};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use tempfile::TempDir;

/// Bytes of one file.
const FILE: usize = 40_960;
/// The most bytes of a loaded page, with its data.
const WEIGHT_MAX: u64 = 300_000;

fn is_full() -> bool {
    std::env::var("FLETCH_PAGE").is_ok_and(|v| v == "full")
}

/// Returns where to write a picture.
fn figure(name: &str) -> Option<String> {
    let dir = std::env::var_os("FLETCH_PAGE_FIGURES").map(PathBuf::from)?;
    Some(dir.join(format!("admin-page-{name}.png")).display().to_string())
}

fn bytes(seed: usize) -> Vec<u8> {
    let mut out = vec![0; FILE];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

/// A server with packed datasets in a store.
struct Stage {
    site: Site,
    emulator: OriginEmulator,
    config: String,
    _dir: TempDir,
}

impl Stage {
    fn start(cache: &str, more: &[&str]) -> Self {
        let emulator = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
        let dir = TempDir::with_prefix("fletch-page-").expect("scratch");
        let config = dir.path().join("fletch.toml");
        let text = format!(
            "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nregion = \"x\"\nallow_http = true\n\
             credentials = \"anonymous\"\n",
            emulator.uri(),
            emulator.endpoint()
        );
        fs::write(&config, text).expect("config");
        let config = config.display().to_string();
        let base = ["--config", &config, "--cache-size", cache, "--memory", "128MiB"];
        let site = Site::start(&[&base, more].concat());
        Stage { site, emulator, config, _dir: dir }
    }

    /// Packs a dataset of `n` files, and registers it. Returns its root.
    fn dataset(&self, name: &str, n: usize) -> String {
        for i in 0..n {
            self.emulator.insert(&format!("{name}/f{i:05}"), bytes(i + name.len() * 10_000));
        }
        let uri = format!("{}/{name}", self.emulator.uri());
        let tables = format!("{}/tables-{name}", self.emulator.uri());
        let mut pack = command("fletch");
        pack.args(["pack", &uri, "--to", &tables, "--config", &self.config, "--chunk-size", "1MiB"]);
        let state = self.site.place(&format!("pack-{name}"));
        let root = stdout(&run(pack.arg("--state-dir").arg(state)));
        self.site.register(name, &uri, &tables);
        root
    }

    /// Reads a file as a job. Returns whether the server delivered it.
    fn read(&self, dataset: &str, root: &str, job: &str, file: usize) -> bool {
        let out = Command::new("curl")
            .args(["-s", "--fail", "--max-time", "5", "-o", "/dev/null", "-H", &format!("Fletch-Job: {job}")])
            .args(["-H", &format!("Fletch-Dataset: {dataset}")])
            .arg(format!("{}/v1/versions/{root}/files/f{file:05}", self.site.url))
            .output()
            .expect("curl runs");
        out.status.success()
    }

    fn client(&self) -> Client {
        let endpoint: Endpoint = self.site.url.parse().expect("url");
        Client::new(ClientConfig::new(endpoint, "loader")).expect("client")
    }
}

async fn declare(client: &Client, name: &str, dataset: &str) -> JobHandle {
    let ask = StartJob {
        name: name.parse().expect("name"),
        dataset: Some(dataset.parse().expect("name")),
        version: None,
        root: None,
        layout: None,
        seed: Some(7),
        order: OrderKind::Substitute,
        buckets: None,
        replay: None,
        plan: PlanSpec::default(),
        world: WorldSpec { ranks: 1, batch: 16, tail: Tail::Keep },
        visitation: Visitation::ExactlyOnce,
    };
    client.declare(&ask).await.expect("declared")
}

/// Takes and acknowledges at most `most` batches of an epoch, one each `pause`.
async fn train(job: &JobHandle, epoch: u64, most: usize, pause: Duration) {
    let mut reader = job.reader(epoch, 0, 0).patience(Duration::from_secs(20));
    let mut taken = 0;
    while taken < most {
        match reader.next(16).await {
            Ok(Next::Batch(b)) => {
                let ack = Ack { lease: b.token.lease, upto: b.token.entries, batches: Vec::new() };
                job.ack(epoch, b.token.rank, &[ack]).await.expect("acknowledged");
                job.held().release(epoch, 0, b.token.lease);
                taken += 1;
                tokio::time::sleep(pause).await;
            }
            Ok(Next::Full | Next::Last) => tokio::time::sleep(Duration::from_millis(20)).await,
            Ok(Next::Done) | Err(_) => return,
        }
    }
}

/// Checks what holds for every look: no error, no other host, nothing wider than the screen, small.
#[track_caller]
fn check(seen: &Value, url: &str) {
    // The browser itself logs the answer to the request that has no token yet.
    let errors = seen["errors"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let errors: Vec<_> = errors.filter(|e| !e.ends_with("status of 401 (Unauthorized)")).collect();
    assert!(errors.is_empty(), "{errors:?}");
    let requests = seen["requests"].as_array().expect("requests");
    let foreign: Vec<_> =
        requests.iter().filter(|r| !r.as_str().is_some_and(|r| r.starts_with(url))).collect();
    assert!(foreign.is_empty() && requests.len() > 5, "{foreign:?} of {}", requests.len());
    assert_eq!(seen["too_wide"], false, "the page scrolls sideways");
    assert_eq!(seen["images"], 0);
    assert_eq!(seen["unnamed"], 0, "a control has no name for a screen reader");
    let focus = seen["focus"].as_str().unwrap_or_default();
    assert!(["A", "BUTTON", "SELECT"].contains(&focus), "the keyboard reaches no control: {focus:?}");
    let weight = seen["weight"].as_u64().expect("bytes");
    assert!(weight > 50_000 && weight <= WEIGHT_MAX, "the page has {weight} bytes");
}

#[track_caller]
fn shows(seen: &Value, texts: &[&str]) {
    let text = seen["text"].as_str().expect("text");
    for part in texts {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

/// Returns a number of the page by its name.
#[track_caller]
fn number(seen: &Value, name: &str) -> f64 {
    let value = seen["numbers"][name].as_str().unwrap_or_else(|| panic!("{name} in {}", seen["numbers"]));
    value.parse().unwrap_or_else(|e| panic!("{name} = {value:?}: {e}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_answers_with_the_numbers_of_the_metrics_and_of_the_api() {
    if !have(&[Need::Chromium]) {
        return;
    }
    let stage = tokio::task::block_in_place(|| Stage::start("256MiB", &[]));
    let (root, url) = (tokio::task::block_in_place(|| stage.dataset("images", 80)), stage.site.url.clone());
    let client = stage.client();
    let job = declare(&client, "train-7", "images").await;
    train(&job, 0, usize::MAX, Duration::ZERO).await;
    train(&job, 1, 2, Duration::ZERO).await;
    tokio::task::block_in_place(|| {
        // Hostile texts: names have a grammar, these have none.
        let evil = "<img src=x onerror=alert(1)><script>alert(2)</script>";
        let dir = stage.site.place("evil").join("<img src=x onerror=alert(1)>");
        fs::create_dir_all(&dir).expect("mkdir");
        fs::write(dir.join("a"), "x").expect("write");
        let _ = stage.site.publish("evil", &dir);
        (0..40).for_each(|i| assert!(stage.read("images", &root, "notebook", i % 20)));
        let mount = json!({"dataset": "images", "root": root, "dir": format!("/data/{evil}"), "host": evil,
            "pid": 1, "job": "notebook", "version": "latest", "problem": format!("{evil} is broken")});
        // A mount is forgotten if it is not announced again, so do it before each look.
        let announce = || {
            run(Command::new("curl")
                .args(["-sS", "--fail", "-X", "PUT", "-H", "Content-Type: application/json"])
                .args(["-d", &mount.to_string()])
                .arg(format!("{url}/v1/mounts/m1")))
        };
        let _ = announce();
        let id = job.info().id.clone();
        // Two samples, so that the server has seen what each job does.
        until("the job is seen", Duration::from_secs(15), || {
            let now = stage.site.json("/v1/dashboard");
            now["jobs"].as_array().is_some_and(|jobs| jobs.iter().all(|j| j["state"] != "idle"))
        });
        let seen = look(&json!([
            {"url": url, "until": "notebook"},
            {"url": url, "until": "notebook", "width": 400, "dark": true},
            {"url": url, "until": "Receipt of epoch 0", "hash": format!("#/jobs/{id}"),
                "click": "Receipt of epoch 0", "then": "samples delivered"},
        ]));
        let (metrics, accounts) = (stage.site.metrics(), stage.site.json("/v1/accounts"));
        // The page of a dataset reads tags, so it comes after the numbers.
        let _ = announce();
        let more = look(&json!([
            {"url": url, "until": "train-7", "hash": "#/datasets/default/images",
                "screenshot": figure("dataset")},
            {"url": url, "until": "no such version", "hash": "#/jobs/%3Cscript%3Ealert(3)%3C%2Fscript%3E"},
        ]));
        // The browser itself logs the answer 404 of the last look.
        seen.iter().chain(&more[..1]).for_each(|one| check(one, &url));
        assert!(!more[1]["errors"].to_string().contains("a dialog"), "{:#}", more[1]);
        let (wide, narrow) = (&seen[0], &seen[1]);
        for one in [wide, narrow] {
            shows(one, &["Does it work?", "No: 1 problem", "What to do: FletchMountBroken", "train-7"]);
            shows(one, &["images", evil]);
        }
        let sum = |name: &str| {
            metrics.iter().filter(|(k, _)| k.split('{').next() == Some(name)).map(|(_, v)| v).sum::<f64>()
        };
        assert_eq!(number(wide, "avoided"), sum("fletch_avoided_bytes_total"));
        assert_eq!(number(wide, "delivered"), sum("fletch_bytes_total"));
        assert_eq!(number(wide, "origin"), sum("fletch_origin_read_bytes_total"));
        assert_eq!(number(wide, "cached"), metrics["fletch_disk_chunk_bytes"]);
        assert_eq!(number(wide, "capacity"), metrics["fletch_disk_capacity_bytes"]);
        assert_eq!(number(wide, "chunks"), metrics["fletch_disk_chunks"]);
        assert!(number(wide, "avoided") > 0.0 && number(wide, "avoided-requests") > 0.0);
        let images =
            accounts["datasets"].as_array().expect("a list").iter().find(|d| d["dataset"] == "images");
        let images = images.expect("the dataset");
        for (name, field) in [
            ("cached", "cached_bytes"),
            ("size", "version_bytes"),
            ("avoided", "avoided_bytes"),
            ("delivered", "delivered_bytes"),
        ] {
            assert_eq!(Some(number(wide, &format!("{name}/images"))), images[field].as_f64(), "{name}");
        }
        let (detail, api) = (&seen[2], stage.site.json(&format!("/v1/jobs/{id}")));
        let epoch = api["epochs"].as_array().and_then(|e| e.last()).expect("an epoch");
        assert_eq!(Some(number(detail, "acked")), epoch["acked"].as_f64());
        assert_eq!(Some(number(detail, "planned")), epoch["planned"].as_f64());
        let usage = accounts["jobs"].as_array().expect("a list").iter().find(|j| j["job"] == "train-7");
        let usage = usage.expect("the job");
        for name in ["hit", "substituted", "miss", "bypass", "origin"] {
            assert_eq!(Some(number(detail, name)), usage[format!("{name}_bytes")].as_f64(), "{name}");
        }
        shows(detail, &["Epoch 1: open", "80 samples delivered", "well shuffled"]);
        shows(&more[0], &["latest", &root[..12], "Versions and tags", "train-7", evil]);
        assert_eq!(Some(number(&more[0], "layout")), images["layout_bytes"].as_f64());
        for alert in ["FletchJobStalled", "FletchOriginErrors"] {
            let text = String::from_utf8(stage.site.get(&format!("/runbooks/{alert}"))).expect("text");
            assert!(text.starts_with("# "), "{text}");
        }
    });
}

fn token(home: &Path, file: &Path, tenant: &str, role: &str) -> String {
    let mut c = command("fletch-server");
    c.args(["token", "new", "--tenant", tenant, "--role", role, "--append"]).arg(file);
    let token = stdout(&run(&mut c));
    fs::write(home.join(format!("{tenant}.token")), &token).expect("token");
    token
}

#[test]
fn with_tokens_a_user_sees_its_own_domain_and_no_url_has_the_token() {
    if !have(&[Need::Chromium]) {
        return;
    }
    let home = TempDir::with_prefix("fletch-page-tokens-").expect("home");
    let tokens = home.path().join("tokens.toml");
    let (red, blue) =
        (token(home.path(), &tokens, "red", "user"), token(home.path(), &tokens, "blue", "user"));
    let admin = token(home.path(), &tokens, "chief", "admin");
    let data = home.path().join("data");
    let dirs = format!("{}=*", home.path().display());
    let site = Site::start(&["--auth-tokens", tokens.to_str().expect("utf-8"), "--local-dirs", &dirs]);
    for (tenant, token) in [("red", &red), ("blue", &blue)] {
        let (tree, tables) = (data.join(tenant), home.path().join(format!("tables-{tenant}")));
        fs::create_dir_all(&tree).and_then(|()| fs::create_dir(&tables)).expect("mkdir");
        (0..4).for_each(|i| fs::write(tree.join(format!("{i}")), bytes(i)).expect("write"));
        let root = index(&tree, &tables, &[]);
        let mut c = command("fletch");
        c.args(["register", &format!("set-of-{tenant}"), &tree.display().to_string(), "--server", &site.url]);
        c.arg("--tables").arg(&tables).arg("--token-file").arg(home.path().join(format!("{tenant}.token")));
        run(&mut c);
        run(Command::new("curl")
            .args(["-sS", "--fail", "-o", "/dev/null"])
            .args([
                "-H",
                &format!("Fletch-Job: job-of-{tenant}"),
                "-H",
                &format!("Authorization: Bearer {token}"),
            ])
            .arg(format!("{}/v1/versions/{root}/files/1", site.url)));
    }
    let url = &site.url;
    let seen = look(&json!([
        {"url": url, "until": "The token stays in this tab"},
        {"url": url, "token": "wrong", "until": "no token that this server knows"},
        {"url": url, "token": red, "until": "job-of-red"},
        {"url": url, "token": red, "until": "no such version", "hash": "#/datasets/blue/set-of-blue"},
        {"url": url, "token": admin, "until": "job-of-blue"},
    ]));
    let text = |i: usize| seen[i]["text"].as_str().expect("text");
    for foreign in ["blue", "chief", "Origins"] {
        (0..3).for_each(|i| assert!(!text(i).contains(foreign), "{foreign} in\n{}", text(i)));
    }
    assert!(!text(0).contains("red") && !text(1).contains("set-of"), "data without a token: {}", text(1));
    shows(&seen[2], &["set-of-red", "domain red"]);
    shows(&seen[4], &["set-of-red", "set-of-blue", "job-of-red"]);
    check(&seen[2], url);
    check(&seen[4], url);
    for one in &seen {
        let places = format!("{} {}", one["requests"], one["address"]);
        for token in [&red, &blue, &admin] {
            assert!(!places.contains(token.trim()), "a URL has a token");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_origin_shows_and_names_its_runbook() {
    if !have(&[Need::Chromium]) {
        return;
    }
    let stage = tokio::task::block_in_place(|| {
        Stage::start("24MiB", &["--io-timeout", if is_full() { "30s" } else { "2s" }])
    });
    let root = tokio::task::block_in_place(|| {
        let (root, ..) =
            (stage.dataset("images", 200), stage.dataset("cold", 60), stage.dataset("audio", 120));
        (0..60).for_each(|i| assert!(stage.read("images", &root, "notebook", i % 20)));
        root
    });
    if is_full() {
        healthy(&stage).await;
    }
    // The job has its tables, and none of its samples.
    let job = declare(&stage.client(), "train-7", "cold").await;
    let cold = job.info().root.to_string();
    tokio::task::block_in_place(|| {
        let fault = if is_full() { Fault::Stall } else { Fault::Error { rate: 1.0, status: 403 } };
        stage.emulator.set_fault("", fault, None);
        until("the origin fails", Duration::from_secs(30), || {
            assert!(!stage.read("cold", &cold, "notebook", 0) && stage.read("images", &root, "notebook", 0));
            stage.site.json("/v1/dashboard")["problems"].to_string().contains("FletchOriginErrors")
        });
    });
    let url = &stage.site.url;
    let looks = json!([
        {"url": url, "until": "What to do: FletchOriginErrors", "screenshot": figure("origin")},
        {"url": url, "until": "FletchOriginErrors", "hash": "#/runbooks/FletchOriginErrors"},
    ]);
    let seen = tokio::task::block_in_place(|| look(&looks));
    seen.iter().for_each(|one| check(one, url));
    shows(&seen[0], &["No: ", "Critical: s3://bucket/", "the origin of cold fails", "its origin fails"]);
    if is_full() {
        stall(&stage, &job).await;
    }
}

/// Lets two jobs train for a while, and looks.
async fn healthy(stage: &Stage) {
    let client = stage.client();
    let (images, audio) =
        (declare(&client, "train-6", "images").await, declare(&client, "eval-3", "audio").await);
    let both = async {
        let of_images = async {
            train(&images, 0, usize::MAX, Duration::from_millis(700)).await;
            train(&images, 1, usize::MAX, Duration::from_secs(6)).await;
        };
        tokio::join!(of_images, train(&audio, 0, usize::MAX, Duration::from_secs(9)))
    };
    let url = stage.site.url.clone();
    let id = images.info().id.clone();
    // The jobs do not end by then.
    tokio::time::timeout(Duration::from_secs(65), both).await.expect_err("the jobs ended");
    let looks = json!([
        {"url": url, "until": "notebook", "screenshot": figure("healthy")},
        {"url": url, "until": "notebook", "width": 400, "screenshot": figure("narrow")},
        {"url": url, "until": "Receipt of epoch 0", "hash": format!("#/jobs/{id}"),
            "click": "Receipt of epoch 0", "then": "samples delivered", "screenshot": figure("job")},
    ]);
    let seen = tokio::task::block_in_place(|| look(&looks));
    seen.iter().for_each(|one| check(one, &url));
    shows(&seen[0], &["Yes, nothing is wrong", "train-6", "eval-3"]);
}

/// Lets a job wait for the origin until it counts as stalled, and looks.
async fn stall(stage: &Stage, job: &JobHandle) {
    let url = stage.site.url.clone();
    let looked = tokio::task::spawn_blocking({
        let url = url.clone();
        move || {
            until("the job is stalled", Duration::from_secs(150), || {
                let now = run(Command::new("curl").args(["-sS", "--fail", &format!("{url}/v1/dashboard")]));
                let now: Value = serde_json::from_slice(&now.stdout).expect("json");
                now["jobs_by_state"]["stalled"] == 1
            });
            look(&json!([
                {"url": url, "until": "stands still", "screenshot": figure("stalled")},
                {"url": url, "until": "stands still", "dark": true, "screenshot": figure("dark")},
            ]))
        }
    });
    let waiting = async {
        // A request that the origin lets time out is sent again.
        loop {
            train(job, 0, usize::MAX, Duration::ZERO).await;
        }
    };
    let seen = tokio::select! {
        seen = looked => seen.expect("looked"),
        () = waiting => Vec::new(),
    };
    seen.iter().for_each(|one| check(one, &url));
    shows(&seen[0], &["Warning: train-7", "What to do: FletchJobStalled", "the origin, which fails"]);
}

/// 200 datasets and 1,000 jobs: the first paint on a warm server takes at most a second.
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_jobs_are_painted_within_a_second() {
    if !is_full() || !have(&[Need::Chromium]) {
        return;
    }
    let stage = tokio::task::block_in_place(|| Stage::start("256MiB", &[]));
    let url = stage.site.url.clone();
    tokio::task::block_in_place(|| {
        let _ = stage.dataset("images", 40);
        let (uri, tables) =
            (format!("{}/images", stage.emulator.uri()), format!("{}/tables-images", stage.emulator.uri()));
        (0..199).for_each(|i| stage.site.register(&format!("set-{i:03}"), &uri, &tables));
    });
    let client = stage.client();
    for i in 0..1000 {
        let job = declare(&client, &format!("job-{i:04}"), &format!("set-{:03}", i % 199)).await;
        if i % 10 == 0 {
            train(&job, 0, 1, Duration::ZERO).await;
        }
    }
    tokio::task::block_in_place(|| {
        let looks = json!([
            {"url": url, "until": "of 1,000 jobs"},
            {"url": url, "until": "of 1,000 jobs"},
            {"url": url, "until": "of 1,000 jobs", "click": "show more", "then": "job-0999"},
        ]);
        let seen = look(&looks);
        seen.iter().for_each(|one| check(one, &url));
        let paint = seen[1]["paint_ms"].as_f64().expect("painted");
        eprintln!(
            "200 datasets, 1,000 jobs: first paint after {paint:.0} ms, tables after {:.0} ms, {} bytes",
            seen[1]["shown_ms"].as_f64().unwrap_or_default(),
            seen[1]["weight"]
        );
        assert!(paint <= 1000.0, "the first paint took {paint} ms");
        let begun = std::time::Instant::now();
        let bytes = stage.site.get("/v1/dashboard?rows=2000").len();
        eprintln!("all rows: {bytes} bytes after {:?}", begun.elapsed());
    });
}

/// A longer range comes from a real Prometheus; without one the page says why there is none.
#[test]
fn a_longer_range_comes_from_prometheus() {
    if !is_full() || !have(&[Need::Chromium, Need::Prometheus]) {
        return;
    }
    let stage = Stage::start("256MiB", &[]);
    let root = stage.dataset("images", 40);
    let prometheus = Prometheus::scrape(&stage.site.url);
    let setting = ["--dashboard-prometheus-url", prometheus.url()];
    let page = Site::start(&setting);
    for round in 0..10 {
        (0..40).for_each(|i| assert!(stage.read("images", &root, "notebook", (i + round) % 40)));
        std::thread::sleep(Duration::from_millis(500));
    }
    let ask =
        |then: &str| json!([{"url": page.url, "until": "Range", "choose": ["Range", "6h"], "then": then}]);
    until("Prometheus has the numbers", Duration::from_secs(60), || {
        let history = page.json("/v1/dashboard/history?range=6h");
        history["series"][0]["values"].as_array().is_some_and(|v| v.iter().any(|n| n.as_f64() > Some(0.0)))
    });
    let seen = look(&ask("KiB/s"));
    check(&seen[0], &page.url);
    drop(prometheus);
    let seen = look(&ask("Prometheus cannot be reached"));
    shows(&seen[0], &["dashboard.prometheus_url"]);
}

#[test]
fn the_charting_library_is_the_one_of_the_lock_file() {
    if !have(&[Need::Chromium]) {
        return;
    }
    let built = TempDir::with_prefix("fletch-vendor-").expect("scratch");
    run(Command::new(repo().join("cache-server/page/build.sh")).arg(modules()).arg(built.path()));
    for name in ["uPlot.js", "uPlot.css", "LICENSE"] {
        let read = |dir: &Path| fs::read(dir.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let vendored = repo().join("cache-server/page/vendor");
        assert!(
            read(built.path()) == read(&vendored),
            "vendor/{name} is not that of the lock file: make page"
        );
    }
}
