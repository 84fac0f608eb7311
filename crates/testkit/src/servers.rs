//! Servers of other projects: S3 (moto), Azure Blob (Azurite), plain file servers with and without ranges.
//!
//! A test starts each server that it needs on a free loopback port, and ends it. `tests/install.sh` installs
//! the servers in `test-servers/` of the target directory, or in the folder that `FLETCH_TEST_SERVERS` names.
//! If a server is missing, the test prints the reason and skips; it fails if `FLETCH_TEST_REQUIRE` (a
//! comma-separated list) names the server.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The time within which a server must accept connections.
const START: Duration = Duration::from_secs(60);
/// The number of ports to try: another process may take a free port first.
const TRIES: u32 = 5;
/// The Python program that sends Azure a `PUT`, signed by the account's key.
const AZURE_PUT: &str = include_str!("servers/azure_put.py");

/// A running server of another project. Dropping it ends the server.
pub struct RealServer {
    child: Child,
    address: SocketAddr,
    /// The folder of the server's configuration and data.
    _dir: TempDir,
}

impl RealServer {
    /// `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Sends an unsigned `PUT`. The server of [`s3`] takes it as an object's bytes.
    ///
    /// # Panics
    /// If the server does not take it.
    pub fn put(&self, path: &str, bytes: &[u8]) {
        let answer = request(self.address, &format!("PUT {path}"), bytes);
        assert!(answer.starts_with("HTTP/1.1 200"), "PUT {path}: {answer}");
    }
}

impl Drop for RealServer {
    fn drop(&mut self) {
        // It may have ended by itself; its client saw that.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The account that [`azure`] serves. The account and its key exist only in tests.
pub const AZURE_ACCOUNT: &str = "fletchtest";
/// The key of [`AZURE_ACCOUNT`].
pub const AZURE_KEY: &str = "bm90IGEgc2VjcmV0LCBvbmx5IGEga2V5IGZvciB0ZXN0cw==";

/// The second account that [`azure`] serves, with [`AZURE_KEY`]. It has no container yet.
pub const AZURE_SECOND_ACCOUNT: &str = "fletchtwo";

/// Starts an S3 server with this bucket. Returns `None`, and prints why, if it is not installed.
///
/// # Panics
/// If the server does not start, or if it is required and not installed.
#[must_use]
pub fn s3(bucket: &str) -> Option<RealServer> {
    let program = installed("s3", "s3/bin/moto_server")?;
    let server = start(|port, _| {
        let mut command = Command::new(&program);
        command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
        command
    });
    server.put(&format!("/{bucket}"), b"");
    Some(server)
}

/// Returns the interpreter of the S3 server of [`s3`], which has boto3. Returns `None`, and prints why, if it
/// is not installed.
///
/// # Panics
/// If it is required and not installed.
#[must_use]
pub fn s3_python() -> Option<PathBuf> {
    installed("s3", "s3/bin/python")
}

/// Starts an Azure Blob server with this container, for [`AZURE_ACCOUNT`].
///
/// Its `endpoint` lacks the account's path. Returns `None`, and prints why, if it is not installed.
///
/// # Panics
/// As [`s3`].
#[must_use]
pub fn azure(container: &str) -> Option<RealServer> {
    let program = installed("azure", "azure/node_modules/.bin/azurite-blob")?;
    let server = start(|port, dir| {
        let mut command = Command::new(&program);
        command.args(["--blobHost", "127.0.0.1", "--blobPort", &port.to_string(), "--location"]);
        command.arg(dir).args(["--silent", "--skipApiVersionCheck", "--disableTelemetry"]);
        let accounts = format!("{AZURE_ACCOUNT}:{AZURE_KEY};{AZURE_SECOND_ACCOUNT}:{AZURE_KEY}");
        command.env("AZURITE_ACCOUNTS", accounts);
        command
    });
    azure_container(&server, AZURE_ACCOUNT, container);
    Some(server)
}

/// Makes a container of an account at a server of [`azure`].
///
/// # Panics
/// If the server does not make it.
pub fn azure_container(server: &RealServer, account: &str, container: &str) {
    azure_put((server, account), &format!("{container}?restype=container"), &[], b"");
}

/// Writes a blob of an account to a server of [`azure`].
///
/// # Panics
/// If the server does not take it.
pub fn azure_blob_of(server: &RealServer, account: &str, (container, blob): (&str, &str), bytes: &[u8]) {
    let headers = ["x-ms-blob-type=BlockBlob".to_owned()];
    azure_put((server, account), &format!("{container}/{blob}"), &headers, bytes);
}

/// Writes a blob to a server of [`azure`], with metadata, as Azure's own programs do.
///
/// Blobfuse and Hadoop make a folder as an empty blob with the metadata `hdi_isfolder=true`.
///
/// # Panics
/// If the server does not take it.
pub fn azure_blob(server: &RealServer, container: &str, blob: &str, metadata: &[(&str, &str)], bytes: &[u8]) {
    let mut headers = vec!["x-ms-blob-type=BlockBlob".to_owned()];
    headers.extend(metadata.iter().map(|(name, value)| format!("x-ms-meta-{name}={value}")));
    azure_put((server, AZURE_ACCOUNT), &format!("{container}/{blob}"), &headers, bytes);
}

fn azure_put((server, account): (&RealServer, &str), path: &str, headers: &[String], body: &[u8]) {
    let mut command = Command::new("python3");
    command.args(["-c", AZURE_PUT, &server.endpoint(), account, AZURE_KEY, path]).args(headers);
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = piped.expect("python3 runs");
    child.stdin.take().expect("a pipe").write_all(body).expect("python3 reads the body");
    let done = child.wait_with_output().expect("python3 ends");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "the Azure server did not take {path}: {said}");
}

/// Starts a plain file server over `dir` that supports ranges and etags (nginx).
///
/// # Panics
/// As [`s3`].
#[must_use]
pub fn files_with_ranges(dir: &Path) -> Option<RealServer> {
    let program = on_path("http", "nginx")?;
    let root = dir.display().to_string();
    Some(start(|port, own| {
        let own_dir = own.display();
        // With one process nginx needs no second user, who might not be able to read `dir`.
        let text = format!(
            "daemon off; master_process off; worker_processes 1;\n\
             pid {own_dir}/pid; error_log {own_dir}/error.log;\n\
             events {{ worker_connections 256; }}\n\
             http {{ access_log off; client_body_temp_path {own_dir}; proxy_temp_path {own_dir}; \
             fastcgi_temp_path {own_dir}; uwsgi_temp_path {own_dir}; scgi_temp_path {own_dir};\n\
             server {{ listen 127.0.0.1:{port}; root \"{root}\"; absolute_redirect off; }} }}\n"
        );
        std::fs::write(own.join("nginx.conf"), text).expect("nginx.conf is written");
        let mut command = Command::new(&program);
        command.arg("-c").arg(own.join("nginx.conf")).arg("-e").arg(own.join("error.log"));
        command
    }))
}

/// Starts a plain file server over `dir` that answers a range with the whole file (Python's).
///
/// # Panics
/// As [`s3`].
#[must_use]
pub fn files_without_ranges(dir: &Path) -> Option<RealServer> {
    let program = on_path("http", "python3")?;
    Some(start(|port, _| {
        let mut command = Command::new(&program);
        command.args(["-m", "http.server", "--bind", "127.0.0.1", "--directory"]);
        command.arg(dir).arg(port.to_string());
        command
    }))
}

fn skip<T>(word: &str, why: &str) -> Option<T> {
    let required = std::env::var("FLETCH_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|w| w == word), "required: {word}: {why}; run tests/install.sh");
    eprintln!("SKIPPED: needs {word}: {why}; tests/install.sh installs it");
    None
}

/// Returns the path of an installed server's program, if it exists.
fn installed(word: &str, below: &str) -> Option<PathBuf> {
    let named = std::env::var_os("FLETCH_TEST_SERVERS").map(PathBuf::from);
    // A test runs at TARGET/PROFILE/deps/NAME.
    let exe = std::env::current_exe().expect("a test knows its own path");
    let dirs = named.into_iter().chain(exe.ancestors().skip(1).map(|dir| dir.join("test-servers")));
    let found = dirs.map(|dir| dir.join(below)).find(|path| path.exists());
    if found.is_none() {
        return skip(word, &format!("no test-servers/{below} in the target directory"));
    }
    found
}

fn on_path(word: &str, program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Debian installs servers in sbin, which is not on a user's PATH.
    let dirs = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    let found = dirs.map(|dir| dir.join(program)).find(|path| path.is_file());
    if found.is_none() {
        return skip(word, &format!("no {program}"));
    }
    found
}

/// Starts the command that `command` returns for a port and a folder, and waits until it accepts connections.
fn start(command: impl Fn(u16, &Path) -> Command) -> RealServer {
    for _ in 0..TRIES {
        let dir = tempfile::tempdir().expect("a directory for a server");
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|l| l.local_addr());
        let address = free.expect("a free loopback port");
        let mut command = command(address.port(), dir.path());
        // The kernel kills the server when the test is killed.
        if Path::new("/usr/bin/setpriv").exists() {
            let mut bound = Command::new("/usr/bin/setpriv");
            bound.args(["--pdeathsig", "KILL", "--"]).arg(command.get_program()).args(command.get_args());
            bound.envs(command.get_envs().filter_map(|(k, v)| Some((k.to_owned(), v?.to_owned()))));
            command = bound;
        }
        let log = std::fs::File::create(dir.path().join("log")).expect("a log");
        let child = command
            .env_remove("AWS_CA_BUNDLE")
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let mut server = RealServer { child, address, _dir: dir };
        let began = Instant::now();
        while began.elapsed() < START {
            if TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok() {
                return server;
            }
            if server.child.try_wait().expect("a child can be asked").is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let said = std::fs::read_to_string(server._dir.path().join("log")).unwrap_or_default();
        eprintln!("the server did not start at {address}; it printed: {said}");
    }
    panic!("the server did not start in {TRIES} tries; its output is above");
}

/// Sends a request. Returns the response as text.
fn request(address: SocketAddr, line: &str, body: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).expect("a connection");
    let length = body.len();
    let text = format!(
        "{line} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(&[text.as_bytes(), body].concat()).expect("sent");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer");
    String::from_utf8_lossy(&answer).into_owned()
}
