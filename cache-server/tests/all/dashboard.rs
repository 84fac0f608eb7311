//! Tests what the admin page reads: who sees what, the stream of events, and the histories of Prometheus.

use crate::common::{Node, Tree, body, problem};
use axum::{
    Router,
    extract::RawQuery,
    http::{StatusCode as Status, header},
    response::{IntoResponse as _, Response},
    routing::get,
};
use fletch_api::{
    Code,
    dashboard::{Dashboard, DashboardHistory, HistorySource},
    routes,
};
use fletch_core::Hash;
use parking_lot::Mutex;
use reqwest::StatusCode;
use serde_json::Value;
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio_util::task::TaskTracker;

fn tokens(dir: &Path, of: &[(&str, &str, &str)]) -> String {
    let line = |(token, tenant, role): &(&str, &str, &str)| {
        let hash = Hash::of(token.as_bytes());
        format!("[[token]]\nhash = \"{hash}\"\ntenant = \"{tenant}\"\nrole = \"{role}\"\n")
    };
    let file = dir.join("tokens.toml");
    let part = dir.join("part");
    std::fs::write(&part, of.iter().map(line).collect::<String>()).expect("write");
    std::fs::rename(&part, &file).expect("rename");
    format!("--auth-tokens={}", file.display())
}

async fn json(node: &Node, path: &str, token: Option<&str>) -> Value {
    let mut request = node.get(path);
    if let Some(token) = token {
        request = request.bearer_auth(token);
    }
    let text = body(request.send().await.expect("answer"), StatusCode::OK).await;
    serde_json::from_slice(&text).expect("json")
}

#[tokio::test(flavor = "multi_thread")]
async fn i7_each_caller_sees_its_own_domain_and_tenant() {
    let (tree, dir) = (Tree::usual(), tempfile::tempdir().expect("tempdir"));
    let root = tree.index().root();
    let all = [
        ("tok-r", "red", "user"),
        ("tok-b", "blue", "user"),
        ("tok-a", "chief", "admin"),
        ("tok-m", "chief", "monitor"),
    ];
    let node = Node::start(&[&tokens(dir.path(), &all), &format!("--local-dirs={}=*", tree.uri())]).await;
    for (token, name) in [("tok-r", "set-of-red"), ("tok-b", "set-of-blue")] {
        let what = serde_json::json!({"name": name, "uri": tree.uri()}).to_string();
        let r = node.post(routes::DATASETS, what).bearer_auth(token).send().await.expect("answer");
        assert_eq!(r.status(), StatusCode::CREATED);
        let job = format!("job-{name}");
        let r = node.get(&routes::file(root, "a.bin")).bearer_auth(token).header("fletch-job", job);
        body(r.send().await.expect("answer"), StatusCode::OK).await;
    }
    let (red, admin) = (
        json(&node, routes::DASHBOARD, Some("tok-r")).await,
        json(&node, routes::DASHBOARD, Some("tok-a")).await,
    );
    for foreign in ["blue", "chief"] {
        assert!(!red.to_string().contains(foreign), "{foreign} in {red:#}");
    }
    assert!(red["origins"].as_array().is_some_and(Vec::is_empty) && red["server"]["connections"].is_null());
    for name in ["set-of-red", "job-set-of-red", "set-of-blue", "job-set-of-blue"] {
        assert!(admin.to_string().contains(name), "{name} in {admin:#}");
    }
    let now: Dashboard = serde_json::from_value(red).expect("a dashboard");
    assert_eq!((now.datasets.len(), now.jobs.len(), now.jobs_total), (1, 1, 1));
    let (dataset, job) = ("/v1/dashboard/datasets", format!("/v1/dashboard/jobs/{}", now.jobs[0].id));
    let own = json(&node, &format!("{dataset}/red/set-of-red"), Some("tok-r")).await;
    assert_eq!(own["versions"][0]["root"], root.to_string());
    assert_eq!(json(&node, &job, Some("tok-a")).await["row"]["name"], "job-set-of-red");
    for (path, token) in [
        (format!("{dataset}/red/set-of-red"), "tok-b"),
        (format!("{dataset}/red/none"), "tok-b"),
        (format!("{dataset}/red/none"), "tok-r"),
        (job, "tok-b"),
        ("/v1/dashboard/jobs/none".to_owned(), "tok-r"),
    ] {
        problem(node.get(&path).bearer_auth(token).send().await.expect("answer"), Code::NotFound).await;
    }
    for path in [routes::DASHBOARD, routes::DASHBOARD_EVENTS, routes::DASHBOARD_HISTORY] {
        let r = node.get(path).bearer_auth("tok-m").send().await.expect("answer");
        problem(r, Code::Forbidden).await;
    }
    let r = node.get("/v1/dashboard/history?range=6h").bearer_auth("tok-r");
    problem(r.send().await.expect("answer"), Code::Forbidden).await;
    let r = node.get("/v1/dashboard/history?range=6h").bearer_auth("tok-a");
    let p = problem(r.send().await.expect("answer"), Code::BadRequest).await;
    assert!(p.hint.contains("dashboard.prometheus_url"), "{p}");
    node.running.shutdown().await;
}

/// Reads events until one of a name has come `n` times, or the stream ends. Returns all their names.
async fn names(r: &mut reqwest::Response, wanted: &str, n: usize) -> Vec<String> {
    let mut text = String::new();
    let mut names = Vec::new();
    while names.iter().filter(|name| *name == wanted).count() < n {
        let piece = tokio::time::timeout(Duration::from_secs(20), r.chunk()).await.expect("in time");
        let Ok(Some(piece)) = piece else { break };
        text += &String::from_utf8_lossy(&piece);
        names = text.lines().filter_map(|l| l.strip_prefix("event: ").map(str::to_owned)).collect();
    }
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_ends_with_its_token_and_with_the_server() {
    let dir = tempfile::tempdir().expect("tempdir");
    let admin = ("tok-a", "chief", "admin");
    let node = Node::start(&[&tokens(dir.path(), &[admin, ("tok-r", "red", "user")])]).await;
    let open = |token: &str| node.get(routes::DASHBOARD_EVENTS).bearer_auth(token).send();
    let (mut red, mut chief) = (open("tok-r").await.expect("answer"), open("tok-a").await.expect("answer"));
    assert_eq!(red.headers()["content-type"], "text/event-stream");
    assert_eq!(names(&mut red, "now", 2).await, ["history", "now", "now"]);
    tokens(dir.path(), &[admin]);
    let begun = Instant::now();
    assert_eq!(names(&mut red, "end", 1).await.last().map(String::as_str), Some("end"));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    problem(open("tok-r").await.expect("answer"), Code::Unauthorized).await;
    assert_eq!(names(&mut chief, "now", 2).await[0], "history", "other streams go on");
    let begun = Instant::now();
    let (_, last) = tokio::join!(node.running.shutdown(), names(&mut chief, "none", 1));
    assert_eq!(last.last().map(String::as_str), Some("end"));
    assert!(
        begun.elapsed() < Duration::from_secs(4),
        "a page does not hold up the stop: {:?}",
        begun.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn i6_pages_and_rows_are_bounded() {
    let node = Node::start(&[]).await;
    let mut open = Vec::new();
    for _ in 0..32 {
        let r = node.get(routes::DASHBOARD_EVENTS).send().await.expect("answer");
        assert_eq!(r.status(), StatusCode::OK);
        open.push(r);
    }
    problem(node.get(routes::DASHBOARD_EVENTS).send().await.expect("answer"), Code::Overloaded).await;
    drop(open);
    let tree = Tree::usual();
    tree.index();
    for i in 0..3 {
        node.register(&format!("d{i}"), &tree.uri(), None).await;
    }
    let now: Dashboard =
        serde_json::from_value(json(&node, "/v1/dashboard?rows=2", None).await).expect("a dashboard");
    assert_eq!((now.datasets.len(), now.datasets_total), (2, 3));
    problem(node.get("/v1/dashboard?rows=x").send().await.expect("answer"), Code::BadRequest).await;
    node.running.shutdown().await;
}

#[tokio::test]
async fn files_of_the_page_come_with_a_policy_and_hold_no_data() {
    let node = Node::start(&[]).await;
    for path in ["/", "/page/main.js", "/page/page.css", "/page/vendor/uPlot.js"] {
        let r = node.get(path).send().await.expect("answer");
        let policy = r.headers()["content-security-policy"].to_str().expect("text").to_owned();
        assert!(policy.starts_with("default-src 'none'; script-src 'self';"), "{policy}");
        assert!(!policy.contains("unsafe") && policy.contains("frame-ancestors 'none'"), "{policy}");
        assert_eq!(r.headers()["x-content-type-options"], "nosniff");
        body(r, StatusCode::OK).await;
    }
    for path in [
        "/page/none.js",
        "/page/../Cargo.toml",
        "/page/%2e%2e/Cargo.toml",
        "/runbooks/none",
        "/runbooks/..%2FMETRICS",
        "/runbooks/FletchVersionSkew.md",
    ] {
        let r = node.get(path).send().await.expect("answer");
        problem(r, Code::NotFound).await;
    }
    node.running.shutdown().await;
}

/// What a false Prometheus answers.
#[derive(Debug, Clone, Copy)]
enum Says {
    Matrix,
    Redirect,
    Failure,
    Nonsense,
    TooMuch,
    Nothing,
}

/// Starts a server that answers queries. Returns its URL, and the queries that came.
async fn false_prometheus(says: Arc<Mutex<Says>>, tasks: &TaskTracker) -> (String, Arc<Mutex<Vec<String>>>) {
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = Arc::clone(&asked);
    let answer = move |RawQuery(query): RawQuery| async move {
        let pairs: Vec<(String, String)> =
            url::form_urlencoded::parse(query.unwrap_or_default().as_bytes()).into_owned().collect();
        let of =
            |name: &str| pairs.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone()).unwrap_or_default();
        log.lock().push(of("query"));
        let says = *says.lock();
        let response: Response = match says {
            Says::Matrix => {
                let matrix = serde_json::json!({"status": "success", "data": {"resultType": "matrix",
                    "result": [{"metric": {}, "values": [
                        [of("start").parse::<f64>().expect("start"), "12.5"],
                        [of("end").parse::<f64>().expect("end"), "NaN"]]}]}});
                axum::Json(matrix).into_response()
            }
            Says::Redirect => {
                (Status::FOUND, [(header::LOCATION, "http://127.0.0.1:1/secret")]).into_response()
            }
            Says::Failure => (Status::INTERNAL_SERVER_ERROR, "<script>secret</script>").into_response(),
            Says::Nonsense => "<html>secret</html>".into_response(),
            Says::TooMuch => "x".repeat(3 << 20).into_response(),
            Says::Nothing => std::future::pending().await,
        };
        response
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let url = format!("http://{}/base", listener.local_addr().expect("addr"));
    let router = Router::new().route("/base/api/v1/query_range", get(answer));
    tasks.spawn(async move { axum::serve(listener, router).await });
    (url, asked)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_history_comes_from_prometheus_by_fixed_queries_or_the_error_says_why() {
    let (says, tasks) = (Arc::new(Mutex::new(Says::Matrix)), TaskTracker::new());
    let (url, asked) = false_prometheus(Arc::clone(&says), &tasks).await;
    let node = Node::start(&[&format!("--dashboard-prometheus-url={url}")]).await;
    let ask = |range: &str| node.get(&format!("/v1/dashboard/history?range={range}")).send();
    let got = body(ask("24h").await.expect("answer"), StatusCode::OK).await;
    let history: DashboardHistory = serde_json::from_slice(&got).expect("a history");
    assert_eq!((history.source, history.times.len()), (HistorySource::Prometheus, 241));
    let names: Vec<_> = history.series.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(names, ["delivered", "origin", "avoided", "errors"]);
    for series in &history.series {
        assert_eq!((series.values[0], series.values[240]), (Some(12.5), None), "NaN is not known");
    }
    let first = asked.lock().clone();
    assert!(first.len() == 4 && first.iter().all(|q| q.starts_with("sum(rate(fletch_")), "{first:?}");
    for bad in ["1h", "up", "24h%26query%3Dup", ""] {
        problem(ask(bad).await.expect("answer"), Code::BadRequest).await;
    }
    assert_eq!(asked.lock().len(), 4, "a range that there is not asks nothing");
    for (case, words) in [
        (Says::Redirect, "status 302"),
        (Says::Failure, "status 500"),
        (Says::Nonsense, "does not speak the API"),
        (Says::TooMuch, "more than"),
        (Says::Nothing, "did not answer in 5 s"),
    ] {
        *says.lock() = case;
        let begun = Instant::now();
        let p = problem(ask("7d").await.expect("answer"), Code::PrometheusFailed).await;
        assert!(p.detail.contains(words) && p.hint.contains("prometheus_url"), "{case:?}: {p}");
        assert!(!format!("{p:?}").contains("secret"), "{case:?}: {p:?}");
        assert!(begun.elapsed() < Duration::from_secs(8), "{case:?}: {:?}", begun.elapsed());
    }
    node.running.shutdown().await;
    let node = Node::start(&["--dashboard-prometheus-url=http://127.0.0.1:1"]).await;
    let r = node.get("/v1/dashboard/history?range=6h").send().await.expect("answer");
    let p = problem(r, Code::PrometheusFailed).await;
    assert!(p.detail.contains("cannot be reached"), "{p}");
    node.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_tenant_takes_the_pages_of_another() {
    let dir = tempfile::tempdir().expect("tempdir");
    let both = [("tok-a", "chief", "admin"), ("tok-r", "red", "user")];
    let node = Node::start(&[&tokens(dir.path(), &both)]).await;
    let open = |token: &str| node.get(routes::DASHBOARD_EVENTS).bearer_auth(token).send();
    let mut pages = Vec::new();
    let refused = loop {
        let page = open("tok-r").await.expect("answer");
        if page.status() != StatusCode::OK {
            break page;
        }
        pages.push(page);
    };
    problem(refused, Code::Overloaded).await;
    // Half of the 32 is divided equally, and the tenant has the other half, too.
    assert_eq!(pages.len(), 24);
    assert_eq!(open("tok-a").await.expect("answer").status(), StatusCode::OK);
    let metrics = node.get("/metrics").bearer_auth("tok-a").send().await.expect("answer");
    let text = String::from_utf8(body(metrics, StatusCode::OK).await.to_vec()).expect("text");
    let refusals = r#"fletch_refused_total{limit="page_streams",tenant="red"} 1"#;
    assert!(text.lines().any(|line| line == refusals), "{text}");
    drop(pages);
    node.running.shutdown().await;
}

/// Savings, requests that were not sent and the size of a dataset survive a restart, a dataset that is all on
/// disk is there to 100 %, and a mount, a list and the page say one size.
#[tokio::test(flavor = "multi_thread")]
async fn numbers_of_a_dataset_agree_and_survive_a_restart() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &["--cache-size=64MiB"]).await;
    let size: u64 = tree.files.values().map(|bytes| bytes.len() as u64).sum();
    let read = async |node: &Node| {
        for path in tree.files.keys() {
            let r = node.get(&routes::file(root, path)).send().await.expect("answer");
            assert_eq!(body(r, StatusCode::OK).await.len(), tree.files[path].len(), "{path}");
        }
    };
    for _ in 0..3 {
        read(&node).await;
    }
    let seen = async |node: &Node| {
        let page: Dashboard =
            serde_json::from_value(json(node, routes::DASHBOARD, None).await).expect("a dashboard");
        let listed = json(node, routes::DATASETS, None).await["datasets"][0]["bytes"].as_u64();
        let usage = node.accounts().await.datasets.remove(0);
        assert_eq!((listed, usage.version_bytes), (Some(size), Some(size)));
        assert_eq!(page.datasets[0].usage, usage, "the page and the accounts");
        (page.savings, usage)
    };
    let begun = Instant::now();
    let (savings, usage) = loop {
        let (savings, usage) = seen(&node).await;
        // Chunks reach the disk a moment after they were delivered.
        if usage.cached_bytes == usage.layout_bytes || begun.elapsed() > Duration::from_secs(20) {
            break (savings, usage);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(usage.cached_bytes, usage.layout_bytes, "all is there: 100 %");
    assert_eq!(usage.delivered_bytes, 3 * size);
    assert!(savings.avoided_bytes > size && savings.avoided_requests.is_some_and(|n| n > 0), "{savings:?}");
    let Node { state, running, .. } = node;
    running.shutdown().await;

    let node = Node::start_in(state, &["--cache-size=64MiB"]).await;
    let (after, restarted) = seen(&node).await;
    assert_eq!(after, savings, "nothing was read since");
    assert_eq!(restarted.delivered_bytes, usage.delivered_bytes);
    assert_eq!(node.metric_sum("fletch_avoided_bytes_total").await, 0, "metrics count from the start");
    read(&node).await;
    let (later, usage) = seen(&node).await;
    assert_eq!(usage.delivered_bytes, 4 * size);
    assert!(later.avoided_bytes >= savings.avoided_bytes + size * 9 / 10, "{later:?} after {savings:?}");
    node.running.shutdown().await;
}
