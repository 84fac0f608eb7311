//! `fletch down`: unmounts what this user mounted with `fletch mount`, and stops the own server.

use super::Context;
use crate::failure::{Exit, Failure};
use crate::own_server::records;
use crate::own_server::{OwnPaths, start};
use fletch_client::{Client, ClientConfig, Endpoint};
use fletch_host::mounts::{self, Health};
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a mount that is in use is tried again.
const BUSY_WITHIN: Duration = Duration::from_secs(3);
/// How long the process of an unmounted mount may take to end.
const END_WITHIN: Duration = Duration::from_secs(10);
const RETRY_EVERY: Duration = Duration::from_millis(50);
/// How long a mount may take to say that it lives.
const HEALTH_WITHIN: Duration = Duration::from_secs(2);
/// How long the server may take to name its mounts.
const ASK_WITHIN: Duration = Duration::from_secs(5);

/// A mount that was ended.
#[derive(Serialize)]
struct Ended {
    dir: PathBuf,
    dataset: String,
}

#[derive(Serialize)]
struct Stopped {
    unmounted: Vec<Ended>,
    /// Whether a server ran.
    stopped: bool,
    state: PathBuf,
    cache: PathBuf,
}

/// A mount to end.
#[derive(Default)]
struct Known {
    dataset: String,
    /// The process, if the server knows it.
    pid: Option<u32>,
}

pub fn run(ctx: &Context) -> Result<Exit, Failure> {
    let own = OwnPaths::of_process()?;
    let runs = ctx.rt.block_on(start::running(&own))?.is_some();
    let mut known: BTreeMap<PathBuf, Known> = BTreeMap::new();
    for made in records::all(&own) {
        known.insert(made.dir, Known { dataset: made.dataset, pid: None });
    }
    if runs {
        announced(ctx, &own, &mut known)?;
    }
    let mut unmounted = Vec::new();
    for (dir, mount) in known {
        if end(&dir, &mount)? {
            unmounted.push(Ended { dir: dir.clone(), dataset: mount.dataset });
        }
        records::forget(&own, &dir);
    }
    let stopped = ctx.rt.block_on(start::stop(&own))?;
    // Another command may be about to start a server there: then these stay.
    let _stays = std::fs::remove_file(own.dir.join("start.lock"));
    let _in_use = std::fs::remove_dir(&own.dir);
    let done = Stopped { unmounted, stopped, state: own.state.clone(), cache: own.cache.clone() };
    ctx.out.result(&done, |w| {
        for mount in &done.unmounted {
            writeln!(w, "unmounted {} ({})", mount.dir.display(), mount.dataset)?;
        }
        if !done.stopped {
            return writeln!(w, "no server of yours ran on this machine");
        }
        writeln!(w, "stopped your server")?;
        writeln!(w, "kept what was read, in {}, and the cache, {}", own.state.display(), own.cache.display())
    })?;
    Ok(Exit::Ok)
}

/// Adds the mounts of this machine that announced themselves to the own server.
fn announced(ctx: &Context, own: &OwnPaths, known: &mut BTreeMap<PathBuf, Known>) -> Result<(), Failure> {
    let client = Client::new(ClientConfig::new(Endpoint::Unix(own.socket.clone()), "cli"))?;
    // A server of another release, or one that hangs, is stopped all the same.
    let Ok(all) = ctx.rt.block_on(client.within(ASK_WITHIN).mounts()) else { return Ok(()) };
    let host = host();
    for mount in all.into_iter().filter(|mount| mount.announced.host == host) {
        let entry = known.entry(PathBuf::from(&mount.announced.dir)).or_default();
        entry.dataset = mount.announced.dataset.to_string();
        entry.pid = Some(mount.announced.pid);
    }
    Ok(())
}

/// Returns the name of this machine, as mounts announce it.
fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

/// Unmounts a directory if it shows the dataset. Returns whether it did.
fn end(dir: &Path, known: &Known) -> Result<bool, Failure> {
    let mount = mounts::at(dir).map_err(|e| Failure::io("cannot read the mount table", &e))?;
    if mount.as_ref().and_then(|mount| mount.dataset()) != Some(known.dataset.as_str()) {
        return Ok(false);
    }
    let is_dead = mounts::health(dir, HEALTH_WITHIN) == Health::Dead;
    let until = Instant::now() + BUSY_WITHIN;
    while let Err(why) = unmount(dir, is_dead) {
        if Instant::now() >= until {
            let shown = dir.display();
            return Err(Failure::new(format!("cannot unmount {shown}: {why}; your server still runs"))
                .hint(format!("end the programs that use it (fuser -vm {shown}), then run this again")));
        }
        std::thread::sleep(RETRY_EVERY);
    }
    let until = Instant::now() + END_WITHIN;
    let process = known.pid.map(|pid| PathBuf::from(format!("/proc/{pid}")));
    while process.as_ref().is_some_and(|path| is_mount(path)) && Instant::now() < until {
        std::thread::sleep(RETRY_EVERY);
    }
    Ok(true)
}

/// Whether a process is a mount that has not ended.
fn is_mount(process: &Path) -> bool {
    let name = std::fs::read_link(process.join("exe"));
    name.is_ok_and(|exe| {
        exe.file_name().is_some_and(|name| name.to_string_lossy().starts_with("fletch-mount"))
    })
}

/// Unmounts a directory; one whose process is dead is detached.
fn unmount(dir: &Path, is_dead: bool) -> Result<(), String> {
    let flags = if is_dead { MntFlags::MNT_DETACH } else { MntFlags::empty() };
    match umount2(dir, flags) {
        Ok(()) => return Ok(()),
        Err(Errno::EPERM) => {}
        Err(Errno::EBUSY) => return Err("it is in use".to_owned()),
        Err(e) => return Err(e.desc().to_owned()),
    }
    let mut command = Command::new("fusermount3");
    command.arg("-u").args(is_dead.then_some("-z")).arg("--").arg(dir).stdin(Stdio::null());
    match command.output() {
        Ok(done) if done.status.success() => Ok(()),
        Ok(done) => Err(String::from_utf8_lossy(&done.stderr).trim().to_owned()),
        Err(e) => Err(format!("fusermount3: {e}")),
    }
}
