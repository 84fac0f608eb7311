//! A cluster on the loopback interface: etcd, servers, and a proxy for each edge between them.
//!
//! Every server reaches every etcd by a proxy of its own, so a test can cut one edge and leave the others.
//!
//! ```text
//! server 0 ──proxy 0,0──▶ etcd 0
//!      └─────proxy 0,1──▶ etcd 1      server 1 ──proxy 1,0──▶ etcd 0 …
//! ```

use crate::bins::{Running, bin, command, run, without_variables};
use crate::prometheus::free_port;
use crate::watch::until;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use fletch_testkit::tls;
use nix::sys::signal::Signal;
use parking_lot::Mutex;
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

/// A TCP proxy that a test can cut. Dropping it ends its threads.
#[derive(Debug)]
pub struct Edge {
    port: u16,
    state: Arc<EdgeState>,
}

#[derive(Debug, Default)]
struct EdgeState {
    is_cut: AtomicBool,
    is_held: AtomicBool,
    ends: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
}

impl EdgeState {
    fn close_all(&self) {
        for stream in self.open.lock().drain(..) {
            // The other end may have closed it.
            stream.shutdown(Shutdown::Both).ok();
        }
    }
}

impl Edge {
    /// Starts a proxy to a port of the loopback interface.
    ///
    /// # Panics
    /// If there is no free port.
    #[must_use]
    pub fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let state = Arc::new(EdgeState::default());
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if shared.ends.load(SeqCst) {
                    break;
                }
                if shared.is_cut.load(SeqCst) {
                    continue;
                }
                let Ok(server) = TcpStream::connect(("127.0.0.1", target)) else { continue };
                let streams = || Ok::<_, std::io::Error>((client.try_clone()?, server.try_clone()?));
                let (Ok((a, b)), Ok((c, d))) = (streams(), streams()) else { continue };
                shared.open.lock().extend([a, b]);
                let (there, back) = (Arc::clone(&shared), Arc::clone(&shared));
                thread::spawn(move || copy(client, server, &there));
                thread::spawn(move || copy(d, c, &back));
            }
        });
        Edge { port, state }
    }

    /// Returns the URL of the proxy.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Returns the URL of the proxy to a server that speaks TLS.
    #[must_use]
    pub fn secure_url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// Closes all connections, and every new one at once.
    pub fn cut(&self) {
        self.state.is_cut.store(true, SeqCst);
        self.state.close_all();
    }

    /// Lets connections through again.
    pub fn heal(&self) {
        self.state.is_cut.store(false, SeqCst);
        self.state.is_held.store(false, SeqCst);
    }

    /// Accepts connections, keeps them open, and passes no byte on.
    pub fn hold(&self) {
        self.state.is_held.store(true, SeqCst);
    }
}

impl Drop for Edge {
    fn drop(&mut self) {
        self.state.ends.store(true, SeqCst);
        self.state.close_all();
        // A last connection, so that the thread sees it.
        TcpStream::connect(("127.0.0.1", self.port)).ok();
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream, state: &EdgeState) {
    let mut buffer = vec![0; 16 << 10];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        while state.is_held.load(SeqCst) && !state.ends.load(SeqCst) {
            thread::sleep(Duration::from_millis(5));
        }
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    for stream in [from, to] {
        stream.shutdown(Shutdown::Both).ok();
    }
}

fn copy_all(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-a").arg(from).arg(to).status().expect("cp runs");
    assert!(done.success(), "{} was not copied", from.display());
}

#[derive(Debug)]
struct EtcdNode {
    process: Option<Running>,
    client: u16,
    peer: u16,
}

/// Several processes of etcd. Dropping it ends them.
#[derive(Debug)]
pub struct EtcdCluster {
    nodes: Vec<EtcdNode>,
    is_secure: bool,
    dir: TempDir,
}

impl EtcdCluster {
    /// Starts `n` processes, and waits until they have a leader.
    ///
    /// # Panics
    /// If they do not get ready.
    #[must_use]
    pub fn start(n: usize) -> Self {
        EtcdCluster::begin(n, false)
    }

    /// Starts one process that speaks TLS and asks for a user. The user `fletch` has the password `secret`,
    /// and the rights to the keys of the cluster `default`.
    ///
    /// # Panics
    /// If it does not get ready.
    #[must_use]
    pub fn start_secure() -> Self {
        let all = EtcdCluster::begin(1, true);
        let calls = [
            ("user/add", r#"{"name":"root","password":"root"}"#),
            ("role/add", r#"{"name":"root"}"#),
            ("user/grant", r#"{"user":"root","role":"root"}"#),
            ("user/add", r#"{"name":"fletch","password":"secret"}"#),
            ("role/add", r#"{"name":"fletch"}"#),
            // The keys from `/fletch/default/` to `/fletch/default0`.
            (
                "role/grant",
                r#"{"name":"fletch","perm":{"permType":"READWRITE","key":"L2ZsZXRjaC9kZWZhdWx0Lw==",
                    "range_end":"L2ZsZXRjaC9kZWZhdWx0MA=="}}"#,
            ),
            ("user/grant", r#"{"user":"fletch","role":"fletch"}"#),
            ("enable", "{}"),
        ];
        for (call, body) in calls {
            let done = all.post(0, &format!("/v3/auth/{call}"), body);
            assert!(done.as_ref().is_some_and(|d| d.get("header").is_some()), "{call}: {done:?}");
        }
        all
    }

    fn begin(n: usize, is_secure: bool) -> Self {
        let nodes = (0..n).map(|_| EtcdNode { process: None, client: free_port(), peer: free_port() });
        let dir = TempDir::with_prefix("fletch-etcd-").expect("scratch");
        let mut all = EtcdCluster { nodes: nodes.collect(), is_secure, dir };
        (0..n).for_each(|i| all.revive(i));
        until("etcd has a leader", Duration::from_secs(20), || all.leader().is_some());
        all
    }

    /// Starts a process that does not run, with the data that it had.
    pub fn revive(&mut self, i: usize) {
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let own = self.url(i);
        let is_secure = self.is_secure;
        let peers: Vec<String> =
            self.nodes.iter().enumerate().map(|(i, n)| format!("etcd-{i}={}", url(n.peer))).collect();
        let log = self.dir.path().join(format!("etcd-{i}.log"));
        let log = fs::File::options().create(true).append(true).open(log).expect("log");
        let node = &mut self.nodes[i];
        let mut c = Command::new("etcd");
        c.args(["--name", &format!("etcd-{i}")])
            .arg("--data-dir")
            .arg(self.dir.path().join(format!("data-{i}")))
            .args(["--listen-client-urls", &own, "--advertise-client-urls", &own])
            .args(["--listen-peer-urls", &url(node.peer), "--initial-advertise-peer-urls", &url(node.peer)])
            .args(["--initial-cluster", &peers.join(","), "--initial-cluster-token", "fletch-test"])
            .args(["--snapshot-count", "1000", "--heartbeat-interval", "50", "--election-timeout", "500"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        if is_secure {
            let (certificate, key) = tls::server();
            c.arg("--cert-file").arg(certificate).arg("--key-file").arg(key);
        }
        node.process = Some(Running::spawn("etcd", &mut c));
    }

    fn url(&self, i: usize) -> String {
        format!("{}://127.0.0.1:{}", if self.is_secure { "https" } else { "http" }, self.nodes[i].client)
    }

    /// Kills a process with SIGKILL.
    pub fn kill(&mut self, i: usize) {
        if let Some(mut process) = self.nodes[i].process.take() {
            process.signal(Signal::SIGKILL);
            process.wait(Duration::from_secs(5));
        }
    }

    fn data(&self, i: usize, what: &str) -> PathBuf {
        self.dir.path().join(format!("{what}-{i}"))
    }

    /// Copies the data of a process, which is restarted for that.
    ///
    /// # Panics
    /// If the data cannot be copied.
    pub fn back_up(&mut self, i: usize) {
        self.kill(i);
        copy_all(&self.data(i, "data"), &self.data(i, "backup"));
        self.revive(i);
        until("etcd has a leader", Duration::from_secs(20), || self.leader().is_some());
    }

    /// Replaces the data of a process by what [`Self::back_up`] copied. The process is restarted.
    ///
    /// # Panics
    /// If there is no copy.
    pub fn restore(&mut self, i: usize) {
        self.kill(i);
        fs::remove_dir_all(self.data(i, "data")).expect("the data");
        copy_all(&self.data(i, "backup"), &self.data(i, "data"));
        self.revive(i);
        until("etcd has a leader", Duration::from_secs(20), || self.leader().is_some());
    }

    /// Replaces a process by one without data, as after the loss of its disk.
    ///
    /// # Panics
    /// If it does not get ready.
    pub fn lose(&mut self, i: usize) {
        self.kill(i);
        fs::remove_dir_all(self.data(i, "data")).expect("the data");
        self.revive(i);
        until("etcd has a leader", Duration::from_secs(20), || self.leader().is_some());
    }

    /// Writes keys, many at once.
    ///
    /// # Panics
    /// If etcd does not do it.
    pub fn put_all(&self, keys: &[(String, String)]) {
        let file = self.dir.path().join("body");
        for some in keys.chunks(60) {
            let put = |(key, value): &(String, String)| {
                let (key, value) = (STANDARD.encode(key), STANDARD.encode(value));
                serde_json::json!({"request_put": {"key": key, "value": value}})
            };
            let puts: Vec<Value> = some.iter().map(put).collect();
            fs::write(&file, serde_json::json!({"success": puts}).to_string()).expect("scratch");
            let done = self.post(0, "/v3/kv/txn", &format!("@{}", file.display()));
            assert!(done.is_some_and(|d| d["succeeded"] == true), "etcd did not write the keys");
        }
    }

    /// Returns the number of the leader, if there is one that answers.
    #[must_use]
    pub fn leader(&self) -> Option<usize> {
        (0..self.nodes.len()).find(|i| {
            let status = self.post(*i, "/v3/maintenance/status", "{}");
            status.is_some_and(|s| s["leader"].is_string() && s["leader"] == s["header"]["member_id"])
        })
    }

    /// Returns the revision of the first process. It grows with every write.
    ///
    /// # Panics
    /// If the process does not answer.
    #[must_use]
    pub fn revision(&self) -> u64 {
        let status = self.post(0, "/v3/maintenance/status", "{}").expect("etcd answers");
        status["header"]["revision"].as_str().and_then(|text| text.parse().ok()).expect("a revision")
    }

    fn post(&self, i: usize, path: &str, body: &str) -> Option<Value> {
        self.nodes[i].process.as_ref()?;
        let mut c = Command::new("curl");
        c.args(["-sS", "--max-time", "2", "-d", body, "--cacert"]).arg(tls::authority());
        let out = c.arg(format!("{}{path}", self.url(i))).output().ok()?;
        serde_json::from_slice(&out.stdout).ok()
    }

    /// Deletes all keys.
    ///
    /// # Panics
    /// If etcd does not do it.
    pub fn wipe(&self) {
        // The byte 0 as the key and as its end is the range of all keys.
        let done = self.post(0, "/v3/kv/deleterange", r#"{"key":"AA==","range_end":"AA=="}"#);
        assert!(done.is_some_and(|d| d.get("header").is_some()), "etcd did not delete its keys");
    }
}

/// A server of a cluster, with its own scratch directory.
#[derive(Debug)]
pub struct ClusterServer {
    process: Option<Running>,
    /// The URL of the server.
    pub url: String,
    /// The proxies to etcd, one for each of its processes.
    pub edges: Vec<Edge>,
    scratch: TempDir,
    more: Vec<String>,
    tls: Option<ClientTls>,
    program: PathBuf,
}

/// What clients of a server with TLS need.
#[derive(Debug, Clone)]
pub struct ClientTls {
    /// The file with the CA of the server's certificate.
    pub ca: PathBuf,
    /// The file with the certificate of the client.
    pub cert: PathBuf,
    /// The file with the key of that certificate.
    pub key: PathBuf,
}

impl ClusterServer {
    /// Prepares a server that knows these processes of etcd. [`Self::start`] starts it.
    #[must_use]
    pub fn new(id: &str, etcd: &EtcdCluster, more: &[&str]) -> Self {
        let edges: Vec<Edge> = etcd.nodes.iter().map(|n| Edge::to(n.client)).collect();
        let url = if etcd.is_secure { Edge::secure_url } else { Edge::url };
        let endpoints: Vec<String> = edges.iter().map(url).collect();
        let port = free_port();
        let mut words = vec![
            format!("--listen=127.0.0.1:{port}"),
            "--memory=128MiB".to_owned(),
            "--cache-size=64MiB".to_owned(),
            "--cluster-coordinator=etcd".to_owned(),
            format!("--cluster-id={id}"),
            format!("--cluster-endpoints={}", endpoints.join(",")),
            "--cluster-member-ttl=2s".to_owned(),
        ];
        // A flag of the test replaces the one of the rig.
        let flag = |word: &str| word.split('=').next().unwrap_or_default().to_owned();
        words.retain(|word| more.iter().all(|own| flag(own) != flag(word)));
        words.extend(more.iter().map(|&w| w.to_owned()));
        ClusterServer {
            process: None,
            url: format!("http://127.0.0.1:{port}"),
            edges,
            scratch: TempDir::with_prefix("fletch-member-").expect("scratch"),
            more: words,
            tls: None,
            program: bin("fletch-server"),
        }
    }

    /// Uses another build of the server from its next start on.
    pub fn set_program(&mut self, program: &Path) {
        program.clone_into(&mut self.program);
    }

    /// Returns the server with TLS. `tls`: what the clients of this rig show it.
    #[must_use]
    pub fn with_tls(mut self, tls: &ClientTls) -> Self {
        self.url = self.url.replacen("http:", "https:", 1);
        self.tls = Some(tls.clone());
        self
    }

    fn curl(&self, words: &[&str]) -> Command {
        let mut c = Command::new("curl");
        if let Some(tls) = &self.tls {
            c.arg("--cacert").arg(&tls.ca).arg("--cert").arg(&tls.cert).arg("--key").arg(&tls.key);
        }
        c.args(words);
        c
    }

    fn spawn(&self) -> Running {
        let at = |p: &str| self.scratch.path().join(p);
        let log = fs::File::options().create(true).append(true).open(at("server.log")).expect("log");
        let mut c = without_variables(Command::new(&self.program));
        c.args(&self.more)
            .arg("--socket=none")
            .args([format!("--cache-dir={}", at("cache").display())])
            .args([format!("--state-dir={}", at("state").display())])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        Running::spawn("fletch-server", &mut c)
    }

    /// Adds a word to the command line.
    pub fn add(&mut self, word: String) {
        self.more.push(word);
    }

    /// Registers a dataset. `token`: the file of a token, if the server needs one.
    pub fn register(&self, name: &str, uri: &str, tables: &str, token: Option<&Path>) {
        let mut c = command("fletch");
        c.args(["register", name, uri, "--tables", tables, "--server", &self.url]);
        if let Some(token) = token {
            c.arg("--token-file").arg(token);
        }
        if let Some(tls) = &self.tls {
            c.arg("--ca-file").arg(&tls.ca).arg("--cert-file").arg(&tls.cert).arg("--key-file").arg(&tls.key);
        }
        run(&mut c);
    }

    /// Starts the server, and waits until it answers.
    ///
    /// # Panics
    /// If it ends.
    pub fn start(&mut self) {
        let mut process = self.spawn();
        until("the server answers", Duration::from_secs(20), || {
            assert!(process.alive(), "the server ended: {}", self.log());
            self.status("/livez") == 200
        });
        self.process = Some(process);
    }

    /// Starts the server, which must end by itself. Returns its log.
    ///
    /// # Panics
    /// If it goes on.
    #[must_use]
    pub fn start_in_vain(&mut self) -> String {
        let mut process = self.spawn();
        let status = process.wait(Duration::from_secs(10));
        assert!(!status.success(), "the server ended well: {}", self.log());
        self.log()
    }

    /// Kills the server with SIGKILL.
    pub fn kill(&mut self) {
        self.stop(Signal::SIGKILL);
    }

    /// Ends the server with SIGTERM.
    pub fn end(&mut self) {
        self.stop(Signal::SIGTERM);
    }

    /// Sends a signal to the server, which stays as it is for this rig.
    pub fn signal(&self, signal: Signal) {
        if let Some(process) = &self.process {
            process.signal(signal);
        }
    }

    fn stop(&mut self, signal: Signal) {
        if let Some(mut process) = self.process.take() {
            process.signal(signal);
            process.wait(Duration::from_secs(10));
        }
    }

    /// Cuts or heals the edges to all processes of etcd.
    pub fn cut_all(&self, is_cut: bool) {
        for edge in &self.edges {
            if is_cut { edge.cut() } else { edge.heal() }
        }
    }

    /// Returns the log.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.scratch.path().join("server.log")).unwrap_or_default()
    }

    /// Returns a directory in the scratch directory, and creates it if necessary.
    #[must_use]
    pub fn place(&self, name: &str) -> PathBuf {
        let p = self.scratch.path().join(name);
        fs::create_dir_all(&p).expect("scratch");
        p
    }

    /// Returns the status of a GET. 0: no answer.
    #[must_use]
    pub fn status(&self, path: &str) -> u16 {
        let mut c = self.curl(&["-s", "-o", "/dev/null", "-w", "%{http_code}", "--max-time", "5"]);
        let out = c.arg(format!("{}{path}", self.url)).output().expect("curl runs");
        String::from_utf8_lossy(&out.stdout).parse().unwrap_or(0)
    }

    /// Returns the text of a GET, whatever its status, with its head.
    #[must_use]
    pub fn text(&self, path: &str) -> String {
        let mut c = self.curl(&["-sS", "-i", "--max-time", "15"]);
        c.arg(format!("{}{path}", self.url));
        String::from_utf8_lossy(&run(&mut c).stdout).into_owned()
    }

    /// Returns the bytes of a file of a version, if the server delivers them.
    #[must_use]
    pub fn file(&self, root: &str, path: &str) -> Option<Vec<u8>> {
        let mut c = self.curl(&["-sSf", "--max-time", "15"]);
        let out = c.arg(format!("{}/v1/versions/{root}/files/{path}", self.url)).output().expect("curl runs");
        out.status.success().then_some(out.stdout)
    }

    /// Returns the body of an answer to a request with one header more.
    #[must_use]
    pub fn get_with(&self, path: &str, header: &str) -> Vec<u8> {
        let mut c = self.curl(&["-sSf", "--max-time", "15", "-H", header]);
        c.arg(format!("{}{path}", self.url)).output().expect("curl runs").stdout
    }

    /// Returns the view of the server as JSON. `null`: no answer.
    #[must_use]
    pub fn view(&self) -> Value {
        let mut c = self.curl(&["-s", "--max-time", "5"]);
        let out = c.arg(format!("{}/v1/cluster", self.url)).output();
        serde_json::from_slice(&out.expect("curl runs").stdout).unwrap_or_default()
    }

    /// Returns the members of the view, each with its state, such as `a:up b:down`.
    #[must_use]
    pub fn members(&self) -> String {
        let view = self.view();
        let members = view["members"].as_array().cloned().unwrap_or_default();
        let word = |m: &Value| {
            format!("{}:{}", m["id"].as_str().unwrap_or_default(), m["state"].as_str().unwrap_or_default())
        };
        members.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    /// Returns the number of the view.
    #[must_use]
    pub fn view_number(&self) -> u64 {
        self.view()["view"].as_u64().unwrap_or(0)
    }

    /// Returns the sum of all series of a family.
    #[must_use]
    pub fn sum(&self, family: &str) -> f64 {
        let text = self.text("/metrics");
        let of = |l: &&str| l.strip_prefix(family).is_some_and(|rest| rest.starts_with(['{', ' ']));
        let series = text.lines().filter(of);
        series.filter_map(|l| l.rsplit(' ').next()?.trim().parse::<f64>().ok()).sum()
    }

    /// Returns a series of the metrics.
    #[must_use]
    pub fn metric(&self, series: &str) -> Option<f64> {
        let text = self.text("/metrics");
        text.lines().find_map(|l| l.strip_prefix(series)?.trim().parse().ok())
    }
}

/// Waits until all servers have one view with these members, such as `a:up b:up`. Returns its number.
///
/// # Panics
/// If they do not agree in time.
pub fn agreed(servers: &[&ClusterServer], members: &str, within: Duration) -> u64 {
    let mut seen = Vec::new();
    let end = std::time::Instant::now() + within;
    loop {
        let views: Vec<(u64, String)> = servers.iter().map(|s| (s.view_number(), s.members())).collect();
        if views.iter().all(|v| v.1 == members && v.0 == views[0].0) {
            return views[0].0;
        }
        seen.push(views);
        assert!(std::time::Instant::now() < end, "not {members} within {within:?}: {:?}", seen.last());
        thread::sleep(Duration::from_millis(20));
    }
}
