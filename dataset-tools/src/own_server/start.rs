//! Starts a user's own server, and stops it.

use super::{OwnPaths, program};
use crate::environment::SECRET_VARIABLES;
use crate::failure::{Exit, Failure};
use crate::out::bytes;
use fletch_client::server_choice::{SocketPeer, own_listener};
use fletch_client::{Client, ClientConfig, Endpoint};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// How long a server may take until it answers, and until it ends.
const WITHIN: Duration = Duration::from_secs(20);
/// How long a server that runs may take to answer.
const PROBE_WITHIN: Duration = Duration::from_secs(3);
/// The time between two looks at a server that starts or ends.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long the server stays without work.
const IDLE: &str = "10m";
/// The least free space with which the server starts: its state grows with each registration.
pub const STATE_FREE_MIN: u64 = 1 << 20;
/// The end of a log that an error shows, in bytes and in lines.
const TAIL: (u64, usize) = (4096, 8);

/// Returns the process of the own server, if it runs.
///
/// # Errors
/// The socket is another user's, or cannot be used.
pub async fn running(paths: &OwnPaths) -> Result<Option<SocketPeer>, Failure> {
    Ok(own_listener(&paths.socket, paths.uid).await?)
}

/// Starts the own server unless it runs. Returns whether this call started it.
///
/// # Errors
/// There is no program, a directory cannot be used, or the server ended; then with the end of its log.
pub async fn ensure(paths: &OwnPaths) -> Result<bool, Failure> {
    paths.create()?;
    let path = paths.dir.join("start.lock");
    let cannot = |e| Failure::io(format_args!("cannot lock {}", path.display()), &e);
    let lock = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let lock = lock.map_err(cannot)?;
    // Another command that starts the server holds the lock until the server answers.
    lock.lock().map_err(cannot)?;
    if running(paths).await?.is_some() && is_answering(paths).await? {
        return Ok(false);
    }
    remove_stale(&paths.socket)?;
    let mut child = spawn(paths)?;
    wait_until_it_answers(paths, &mut child).await?;
    Ok(true)
}

/// Whether the own server has not ended. The socket of a process that was killed a moment ago still takes
/// connections. One that hangs counts as running.
async fn is_answering(paths: &OwnPaths) -> Result<bool, Failure> {
    let client = Client::new(ClientConfig::new(Endpoint::Unix(paths.socket.clone()), "cli"))?;
    let until = Instant::now() + PROBE_WITHIN;
    loop {
        let left = until.saturating_duration_since(Instant::now()).max(LOOK_EVERY);
        let answer = client.within(left).fail_fast().info().await;
        if !answer.is_err_and(|e| e.is_unreachable()) {
            return Ok(true);
        }
        if running(paths).await?.is_none() {
            return Ok(false);
        }
        if Instant::now() >= until {
            return Ok(true);
        }
        sleep(LOOK_EVERY).await;
    }
}

/// Removes a socket file on which no process listens.
fn remove_stale(socket: &Path) -> Result<(), Failure> {
    let shown = socket.display();
    match fs::symlink_metadata(socket) {
        Err(_) => Ok(()),
        Ok(meta) if meta.file_type().is_socket() => {
            fs::remove_file(socket).map_err(|e| Failure::io(format_args!("cannot remove {shown}"), &e))
        }
        Ok(_) => Err(Failure::new(format!("{shown} is in the way of your server's socket"))
            .hint(format!("remove it: rm {shown}"))),
    }
}

fn spawn(paths: &OwnPaths) -> Result<Child, Failure> {
    let server = program("fletch-server").ok_or_else(|| {
        Failure::new("there is no program fletch-server beside fletch or on the PATH")
            .hint("install it beside fletch, or name a running server with --server")
    })?;
    let free = paths.state_free();
    if let Some(free) = free.filter(|free| *free < STATE_FREE_MIN) {
        let (state, free) = (paths.state.display(), bytes(free));
        return Err(Failure::new(format!(
            "the disk of {state} is full ({free} free): your server cannot start"
        ))
        .hint("free some space, or set FLETCH_STATE_DIR to another directory")
        .exit(Exit::NoSpace));
    }
    let log_path = paths.server_log();
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(&log_path);
    let cannot_log = |e| Failure::io(format_args!("cannot write {}", log_path.display()), &e);
    let log = log.map_err(cannot_log)?;
    // `setsid` makes a session of its own, which no terminal ends; the group alone escapes only Ctrl-C.
    let mut command = match super::on_path("setsid") {
        Some(setsid) => {
            let mut command = Command::new(setsid);
            command.arg(&server);
            command
        }
        None => {
            let mut command = Command::new(&server);
            command.process_group(0);
            command
        }
    };
    command.args(["--listen", "none", "--socket"]).arg(&paths.socket);
    command.arg("--state-dir").arg(&paths.state).arg("--cache-dir").arg(&paths.cache);
    command.args(["--cache-size", &paths.cache_bytes().to_string(), "--idle", IDLE, "--log-file"]);
    command.arg(&log_path);
    let inherited = std::env::vars_os().map(|(name, _)| name);
    for name in inherited.filter(|name| name.to_string_lossy().starts_with("FLETCH_")) {
        command.env_remove(name);
    }
    for name in SECRET_VARIABLES {
        command.env_remove(name);
    }
    command.current_dir("/").stdin(Stdio::null()).stdout(log.try_clone().map_err(cannot_log)?).stderr(log);
    command.spawn().map_err(|e| Failure::io(format_args!("cannot start {}", server.display()), &e))
}

async fn wait_until_it_answers(paths: &OwnPaths, child: &mut Child) -> Result<(), Failure> {
    let until = Instant::now() + WITHIN;
    let log = paths.server_log();
    loop {
        if running(paths).await?.is_some() {
            let client = Client::new(ClientConfig::new(Endpoint::Unix(paths.socket.clone()), "cli"))?;
            client.within(WITHIN).info().await?;
            return Ok(());
        }
        if let Ok(Some(status)) = child.try_wait() {
            let what = format!("your server ended while it started ({status}):\n{}", tail(&log));
            return Err(Failure::new(what).hint(format!("its log is {}", log.display())));
        }
        if Instant::now() >= until {
            let what = format!("your server does not answer after {WITHIN:?}:\n{}", tail(&log));
            return Err(Failure::new(what)
                .hint(format!("its log is {}; `fletch down` stops it", log.display()))
                .exit(Exit::Unreachable));
        }
        sleep(LOOK_EVERY).await;
    }
}

/// Returns the last lines of a log, each indented.
fn tail(log: &Path) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL.0)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_else(|e| format!("(its log cannot be read: {e})"));
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(TAIL.1)..];
    last.iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}

/// Stops the own server. Returns whether it ran.
///
/// # Errors
/// It is another user's, or does not end in time.
pub async fn stop(paths: &OwnPaths) -> Result<bool, Failure> {
    let Some(peer) = running(paths).await? else { return Ok(false) };
    let shown = paths.socket.display();
    let pid = peer.pid.filter(|pid| *pid > 0).ok_or_else(|| {
        Failure::new(format!("the server at {shown} runs in another container")).hint("stop it there")
    })?;
    let pid = Pid::from_raw(pid);
    match kill(pid, Signal::SIGTERM) {
        Ok(()) | Err(nix::errno::Errno::ESRCH) => {}
        Err(e) => {
            return Err(Failure::new(format!("cannot stop your server, process {pid}: {}", e.desc()))
                .hint(format!("stop it as the user that started it: kill {pid}"))
                .exit(Exit::Denied));
        }
    }
    let until = Instant::now() + WITHIN;
    while is_alive(pid) {
        if Instant::now() >= until {
            return Err(Failure::new(format!("your server, process {pid}, did not end within {WITHIN:?}"))
                .hint(format!("read {}; then kill -9 {pid}", paths.server_log().display())));
        }
        sleep(LOOK_EVERY).await;
    }
    remove_stale(&paths.socket)?;
    Ok(true)
}

/// Whether a process runs. A process that ended and that nobody asked for its status does not.
fn is_alive(pid: Pid) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The state follows the name, which may have any character.
    !stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['Z', 'X']))
}
