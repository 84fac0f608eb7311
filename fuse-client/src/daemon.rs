//! `--daemon`: the program starts itself again in a session of its own and returns when that one
//! is usable, or says why it is not.
//!
//! Between the two is one pipe, the child's stdout: a line `ready TEXT`, or `failed CODE TEXT`.

use crate::cli::{Cli, default_state_dir};
use anyhow::{Context, Result};
use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Set for the child alone.
const CHILD_ENV: &str = "FLETCH_MOUNT_CHILD";

/// Whether this process is the one in the background.
#[must_use]
pub fn is_child() -> bool {
    std::env::var_os(CHILD_ENV).is_some()
}

/// In the child: leaves the terminal's session and its directory.
///
/// # Errors
/// What the system says.
pub fn detach() -> Result<()> {
    nix::unistd::setsid().context("setsid")?;
    std::env::set_current_dir("/").context("chdir /")?;
    Ok(())
}

/// In the child: tells the parent that it is usable.
///
/// # Errors
/// When the parent is gone.
pub fn report_ready(text: &str) -> Result<()> {
    send_line(&format!("ready {text}"))
}

/// In the child: tells the parent why it ends. `code` is the exit code.
///
/// # Errors
/// When the parent is gone.
pub fn report_failed(code: u8, text: &str) -> Result<()> {
    send_line(&format!("failed {code} {}", text.replace('\n', " ")))
}

fn send_line(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()?;
    Ok(())
}

/// In the parent: starts the child and waits for its word. Returns what to print and the exit code.
///
/// # Errors
/// When the child cannot be started.
pub fn launch(cli: &Cli) -> Result<(String, u8)> {
    let log = match &cli.log_file {
        Some(path) => path.clone(),
        None => default_log(cli)?,
    };
    let stderr = open_log(&log)?;
    let program = std::env::current_exe().context("the path of this program")?;
    let mut child = Command::new(program)
        .args(std::env::args_os().skip(1))
        .env(CHILD_ENV, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(stderr)
        .spawn()
        .context("starting the mount in the background")?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        BufReader::new(out).read_line(&mut line).context("waiting for the mount")?;
    }
    let words = line.trim_end();
    if let Some(text) = words.strip_prefix("ready ") {
        return Ok((format!("{text}; log: {}", log.display()), 0));
    }
    let status = child.wait().context("waiting for the mount")?;
    let failed = words.strip_prefix("failed ").and_then(|rest| {
        let (code, text) = rest.split_once(' ')?;
        Some((text.to_owned(), code.parse().ok()?))
    });
    Ok(failed.unwrap_or_else(|| (format!("the mount ended ({status}); see {}", log.display()), 1)))
}

fn default_log(cli: &Cli) -> Result<PathBuf> {
    let dir = cli.state_dir.clone().or_else(default_state_dir);
    let dir = dir.context("neither XDG_STATE_HOME nor HOME is set: give --log-file")?;
    std::fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    Ok(dir.join("fletch-mount.log"))
}

fn open_log(path: &Path) -> Result<File> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| format!("log file {}", path.display()))
}
