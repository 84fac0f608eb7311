//! `--status DIR`: which processes hold and serve the mount at a directory, and whether it outlives them.
//!
//! It reads the mount table and the processes' flags. It does not touch the mount, which may hang.

use crate::cli::Cli;
use crate::datasets::directory;
use crate::keeper::SOCKET_VARIABLE;
use crate::mount_dir::real_path;
use anyhow::{Context as _, Result, bail};
use clap::Parser as _;
use fletch_host::mounts;
use serde::Serialize;
use std::{
    ffi::{OsStr, OsString},
    fmt, fs,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

/// A process of `fletch-mount`.
struct Process {
    pid: u32,
    cli: Cli,
    /// Whether a keeper started it.
    has_keeper: bool,
}

/// The processes of a mount.
#[derive(Debug, Serialize)]
pub struct Status {
    mount: String,
    dataset: String,
    /// The ids of the processes that hold and serve it.
    keeper: Option<u32>,
    worker: Option<u32>,
    /// Whether its readers survive their end; `None`: nobody can say.
    survives: Option<bool>,
    why: &'static str,
}

impl fmt::Display for Status {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |pid: Option<u32>| pid.map_or("none".to_owned(), |pid| format!("process {pid}"));
        let (keeper, worker) = (shown(self.keeper), shown(self.worker));
        let Status { mount: dir, dataset, .. } = self;
        writeln!(out, "mount     {dir} ({dataset})\nkeeper    {keeper}\nworker    {worker}")?;
        write!(out, "survives  {}", self.why)
    }
}

/// Returns the processes of the mount at `dir`.
///
/// # Errors
/// Nothing of Fletch is mounted there.
pub fn of(dir: &Path) -> Result<Status> {
    let dir = real_path(dir)?;
    let entry = mounts::at(&dir).context("cannot read the mount table")?;
    let shown = entry.as_ref().and_then(|entry| match &entry.source {
        source if source == directory::SOURCE => Some("all datasets"),
        _ => entry.dataset(),
    });
    let Some(dataset) = shown.map(ToOwned::to_owned) else {
        bail!("{} is no mount of Fletch; findmnt -t fuse.fletch lists them", dir.display());
    };
    let (keeper, worker) = processes_of(&dir, &all()?);
    let (survives, why) = match (keeper, worker) {
        (Some(_), Some(_)) => (Some(true), "yes: readers wait until the next process serves the mount"),
        (Some(_), None) => {
            (Some(true), "waiting: no process serves the mount, and the log says why the last one ended")
        }
        (None, Some(_)) => {
            (Some(false), "no: the mount has no keeper (--survive false, or the keeper was killed)")
        }
        (None, None) => {
            (None, "unknown: no process of the mount can be seen by this user, in this container")
        }
    };
    Ok(Status { mount: dir.display().to_string(), dataset, keeper, worker, survives, why })
}

/// Returns the keeper and the worker of the mount at `dir`.
fn processes_of(dir: &Path, all: &[Process]) -> (Option<u32>, Option<u32>) {
    let is_of_it = |process: &&Process| match (&process.cli.dir, &process.cli.datasets) {
        (Some(own), _) => own == dir,
        (None, Some(links)) => dir.starts_with(links),
        (None, None) => false,
    };
    let serves = |process: &&Process| {
        process.has_keeper || process.cli.keeper.is_some() || process.cli.survive == Some(false)
    };
    let worker = all.iter().filter(is_of_it).find(serves);
    let socket = worker.and_then(|worker| worker.cli.keeper.as_ref());
    let holds = |process: &&Process| match (&process.cli.hold, socket) {
        (Some(hold), Some(socket)) => hold == socket,
        (Some(_), None) => worker.is_none() && process.cli.hold_below.iter().any(|at| dir.starts_with(at)),
        (None, _) => is_of_it(process) && !serves(process),
    };
    let pid = |process: &Process| process.pid;
    (all.iter().find(holds).map(pid), worker.map(pid))
}

/// Returns the processes of `fletch-mount` that this user may look at.
fn all() -> Result<Vec<Process>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("cannot list processes")? {
        let entry = entry.context("cannot list processes")?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // It may be another user's, or gone.
        found.extend(process(pid, &entry.path()));
    }
    Ok(found)
}

fn process(pid: u32, at: &Path) -> Option<Process> {
    let words = |file: &str| -> Option<Vec<OsString>> {
        let bytes = fs::read(at.join(file)).ok()?;
        Some(bytes.split(|byte| *byte == 0).map(|word| OsStr::from_bytes(word).to_owned()).collect())
    };
    let arguments = words("cmdline")?;
    (Path::new(arguments.first()?).file_name()? == "fletch-mount").then_some(())?;
    // The last word ends with a zero, too.
    let mut cli = Cli::try_parse_from(&arguments[..arguments.len() - 1]).ok()?;
    let variables = words("environ")?;
    let variable = |name: &str| {
        let value = |pair: &OsString| {
            pair.as_bytes()
                .strip_prefix(name.as_bytes())?
                .strip_prefix(b"=")
                .map(|v| OsStr::from_bytes(v).to_owned())
        };
        variables.iter().find_map(value)
    };
    let here = fs::read_link(at.join("cwd")).ok()?;
    for path in [&mut cli.dir, &mut cli.datasets].into_iter().flatten() {
        *path = real_path(&here.join(&path)).ok()?;
    }
    cli.keeper = variable("FLETCH_KEEPER").map(PathBuf::from).or(cli.keeper);
    cli.survive = cli.survive.or(variable("FLETCH_SURVIVE").map(|value| value != "false"));
    Some(Process { pid, cli, has_keeper: variable(SOCKET_VARIABLE).is_some() })
}
