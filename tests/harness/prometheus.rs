//! A real Prometheus that scrapes a server, and the queries of a page of the documents.

use crate::bins::{Running, repo, run};
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
        Prometheus::watch(&[("fletch", server)], "")
    }

    /// Starts Prometheus, which scrapes programs of this machine (`(job, http://host:port)`) several times a
    /// second, the first of which is a server, and evaluates the chart's rules as often. `scrape` has more
    /// lines of the scrape configurations, such as `authorization`.
    ///
    /// # Panics
    /// If it does not get ready.
    #[must_use]
    pub fn watch(targets: &[(&str, &str)], scrape: &str) -> Self {
        let dir = TempDir::with_prefix("fletch-prometheus-").expect("scratch");
        let mut config = format!(
            "global: {{scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 250ms}}\n\
             rule_files: ['{}/helm/fletch/rules/*.yaml']\nscrape_configs:\n",
            repo().display()
        );
        for (job, url) in targets {
            let target = url.trim_start_matches("http://");
            config.push_str(&format!(
                "- job_name: {job}\n  static_configs: [{{targets: ['{target}']}}]\n{scrape}"
            ));
        }
        let at = dir.path().join("prometheus.yml");
        fs::write(&at, config).expect("config");
        // Prometheus does not say which port it got, so it is told a free one.
        let port = free_port();
        let mut c = Command::new("prometheus");
        c.arg(format!("--config.file={}", at.display()))
            .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(dir.path().join("log")).expect("log"));
        let process = Running::spawn("prometheus", &mut c);
        let this = Prometheus { url: format!("http://127.0.0.1:{port}"), _process: process, _dir: dir };
        until("Prometheus has scraped all targets", Duration::from_secs(30), || {
            let up = this.try_query("count(up == 1)", None);
            up.is_some_and(|up| up.values().any(|n| *n == targets.len() as f64))
        });
        this
    }

    /// Returns the URL.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the expressions of the chart's alerts, by name.
    ///
    /// # Panics
    /// If Prometheus has no such rules.
    #[must_use]
    pub fn alerts(&self) -> BTreeMap<String, Vec<String>> {
        let mut ask = Command::new("curl");
        ask.args(["-sS", "--max-time", "10"]).arg(format!("{}/api/v1/rules", self.url));
        let json: Value = serde_json::from_slice(&run(&mut ask).stdout).expect("JSON");
        let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let groups = json["data"]["groups"].as_array().expect("groups");
        for rule in groups.iter().flat_map(|g| g["rules"].as_array().expect("rules")) {
            let text = |key: &str| rule[key].as_str().unwrap_or_default().to_owned();
            if text("type") == "alerting" {
                found.entry(text("name")).or_default().push(text("query"));
            }
        }
        assert!(!found.is_empty(), "{json}");
        found
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

/// Returns a free port of the loopback interface.
///
/// # Panics
/// If there is none.
#[must_use]
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port()
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
