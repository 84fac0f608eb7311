//! `--daemon`: starts this program again as a child in a session of its own. The parent returns when the
//! mount of the child is usable, or prints why it failed.
//!
//! The child writes one line to its stdout, a pipe to the parent: `ready TEXT`, or `failed CODE TEXT`.

use crate::cli::{Cli, default_state_dir};
use anyhow::{Context, Result};
use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The environment variable that marks the child.
const CHILD_ENV: &str = "FLETCH_MOUNT_CHILD";

/// Returns whether this process is the child in the background.
#[must_use]
pub fn is_child() -> bool {
    std::env::var_os(CHILD_ENV).is_some()
}

/// Leaves the terminal's session. Called in the child. It stays in its working directory: relative paths
/// among the flags count from there, also in the processes that a keeper starts.
///
/// # Errors
/// The error of the system.
pub fn detach() -> Result<()> {
    nix::unistd::setsid().map(drop).context("setsid")
}

/// Tells the parent that the mount is usable. Called in the child.
///
/// # Errors
/// The parent is gone.
pub fn report_ready(text: &str) -> Result<()> {
    send_line(&format!("ready {text}"))
}

/// Tells the parent why the mount failed, with the exit code. Called in the child.
///
/// # Errors
/// The parent is gone.
pub fn report_failed(code: u8, text: &str) -> Result<()> {
    send_line(&format!("failed {code} {}", text.replace('\n', " ")))
}

fn send_line(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()?;
    Ok(())
}

/// Starts the child and waits for its line. Returns the text to print and the exit code. Called in the
/// parent.
///
/// # Errors
/// The log file cannot be opened, or the child cannot be started.
pub fn launch(cli: &Cli) -> Result<(String, u8)> {
    let log = match &cli.log_file {
        Some(path) => path.clone(),
        None => default_log(cli)?,
    };
    let stderr = open_log(&log)?;
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let mut child = Command::new(program)
        .args(std::env::args_os().skip(1))
        .env(CHILD_ENV, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(stderr)
        .spawn()
        .context("cannot start the mount in the background")?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        BufReader::new(out).read_line(&mut line).context("cannot read from the mount in the background")?;
    }
    let words = line.trim_end();
    if let Some(text) = words.strip_prefix("ready ") {
        return Ok((format!("{text}; log: {}", log.display()), 0));
    }
    let status = child.wait().context("cannot wait for the mount in the background")?;
    let failed = words.strip_prefix("failed ").and_then(|rest| {
        let (code, text) = rest.split_once(' ')?;
        Some((text.to_owned(), code.parse().ok()?))
    });
    Ok(failed.unwrap_or_else(|| (format!("the mount ended ({status}); see {}", log.display()), 1)))
}

fn default_log(cli: &Cli) -> Result<PathBuf> {
    let dir = cli.state_dir.clone().or_else(default_state_dir);
    let dir =
        dir.context("no directory for the log: XDG_STATE_HOME and HOME are not set; give --log-file")?;
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(dir.join("fletch-mount.log"))
}

fn open_log(path: &Path) -> Result<File> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| format!("cannot open the log file {}", path.display()))
}
