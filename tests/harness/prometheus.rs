//! A real Prometheus that scrapes a server, and the queries of a page of the documents.

use crate::bins::Running;
use crate::watch::until;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tempfile::TempDir;

/// A Prometheus with its own storage. Dropping it ends it.
#[derive(Debug)]
pub struct Prometheus {
    url: String,
    _process: Running,
    _dir: TempDir,
}

/// The answer to a query: the value of each series, by its labels in order (`dataset=set,result=hit`).
pub type Answer = BTreeMap<String, f64>;

impl Prometheus {
    /// Starts Prometheus, which scrapes a server of this machine (`http://host:port`) several times a second.
    ///
    /// # Panics
    /// If it does not get ready.
    #[must_use]
    pub fn scrape(server: &str) -> Self {
        let dir = TempDir::with_prefix("fletch-prometheus-").expect("scratch");
        let target = server.trim_start_matches("http://");
        let config = format!(
            "global: {{scrape_interval: 250ms, scrape_timeout: 250ms}}\nscrape_configs:\n\
             - job_name: fletch\n  static_configs: [{{targets: ['{target}']}}]\n"
        );
        let at = dir.path().join("prometheus.yml");
        fs::write(&at, config).expect("config");
        // Prometheus does not say which port it got, so it is told a free one.
        let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
        let mut c = Command::new("prometheus");
        c.arg(format!("--config.file={}", at.display()))
            .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(dir.path().join("log")).expect("log"));
        let process = Running::spawn("prometheus", &mut c);
        let this = Prometheus { url: format!("http://127.0.0.1:{port}"), _process: process, _dir: dir };
        until("Prometheus has scraped the server", Duration::from_secs(30), || {
            this.try_query("fletch_uptime_seconds", None).is_some_and(|answer| !answer.is_empty())
        });
        this
    }

    /// Returns the URL.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    fn try_query(&self, query: &str, time: Option<f64>) -> Option<Answer> {
        let mut c = Command::new("curl");
        c.args(["-sS", "--max-time", "10", "-G", "--data-urlencode"]).arg(format!("query={query}"));
        if let Some(time) = time {
            c.arg("--data-urlencode").arg(format!("time={time:.3}"));
        }
        let out = c.arg(format!("{}/api/v1/query", self.url)).output().expect("curl runs");
        let json: Value = serde_json::from_slice(&out.stdout).ok()?;
        assert!(json["status"] != "error", "{query}: {json}");
        let rows = json["data"]["result"].as_array()?;
        let row = |row: &Value| {
            let labels = row["metric"].as_object()?;
            let name: Vec<String> = labels
                .iter()
                .filter(|(label, _)| !["__name__", "instance", "job"].contains(&label.as_str()))
                .map(|(label, value)| format!("{label}={}", value.as_str().unwrap_or_default()))
                .collect();
            Some((name.join(","), row["value"][1].as_str()?.parse().ok()?))
        };
        rows.iter().map(row).collect()
    }

    /// Returns the answer to a query now, or at a time in seconds since 1970.
    ///
    /// # Panics
    /// If Prometheus rejects the query.
    #[must_use]
    pub fn query(&self, query: &str, time: Option<f64>) -> Answer {
        self.try_query(query, time).unwrap_or_else(|| panic!("{query}: no answer"))
    }

    /// Waits for a scrape that began after this call. Returns a time at which queries see it.
    #[must_use]
    pub fn settle(&self) -> f64 {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs_f64();
        let asked = now();
        until("another scrape", Duration::from_secs(30), || {
            let last = self.query("timestamp(fletch_uptime_seconds)", None);
            last.values().next().is_some_and(|at| *at > asked)
        });
        now()
    }
}

/// Returns the queries of a section of a page, by their question: the rows `| question | query |`.
///
/// # Panics
/// If the page has no such section.
#[must_use]
pub fn queries(page: &str, section: &str) -> BTreeMap<String, String> {
    let from = page.find(&format!("\n## {section}\n")).unwrap_or_else(|| panic!("no section {section}"));
    let text = &page[from + 4..];
    let text = &text[..text.find("\n## ").unwrap_or(text.len())];
    // A bar within a query is escaped.
    let cells = |line: &str| {
        let line = line.replace("\\|", "\0");
        let cells: Vec<String> = line.split('|').map(|c| c.trim().replace('\0', "|")).collect();
        Some((cells.get(1)?.clone(), cells.get(2)?.strip_prefix('`')?.strip_suffix('`')?.to_owned()))
    };
    text.lines().filter(|l| l.starts_with('|')).filter_map(cells).collect()
}
