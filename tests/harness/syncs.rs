//! The moment between "durable" and whatever follows from it: threads of a process are held when a file is synced.
//!
//! strace stops a thread at the end of its `fdatasync` and writes that down; for as long as it is held the call has
//! succeeded in the kernel and the program does not know yet.

use crate::{bins::Running, watch::until};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

/// A process whose threads are held after each `fdatasync`.
#[derive(Debug)]
pub struct Syncs {
    tracer: Running,
    told: PathBuf,
    /// Lines read.
    read: usize,
    /// By thread: what it syncs, where that was told in two lines.
    begun: BTreeMap<String, String>,
}

impl Syncs {
    /// From when this returns every thread of the process is held for `hold` at the end of an `fdatasync`. `told` is
    /// a scratch file.
    ///
    /// # Panics
    /// When strace cannot attach.
    #[must_use]
    pub fn hold(pid: u32, told: PathBuf, hold: Duration) -> Self {
        let mut c = Command::new("strace");
        c.args(["-f", "-y", "-qq", "-e", "trace=fdatasync", "-e", "signal=none", "-e"])
            .arg(format!("inject=fdatasync:delay_exit={}", hold.as_micros()))
            .arg("-o")
            .arg(&told)
            .args(["-p", &pid.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut tracer = Running::spawn("strace", &mut c);
        let by = format!("TracerPid:\t{}", tracer.pid());
        until("strace is attached", Duration::from_secs(20), || {
            assert!(tracer.alive(), "strace cannot attach to {pid}");
            let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            tasks
                .map(|t| fs::read_to_string(t.path().join("status")).unwrap_or_default())
                .all(|s| s.lines().any(|l| l == by))
        });
        Syncs { tracer, told, read: 0, begun: BTreeMap::new() }
    }

    /// Waits until a sync of `file` has succeeded that was not waited for before. The thread that asked for it is
    /// held from then on.
    ///
    /// # Panics
    /// When none comes in time.
    pub fn next(&mut self, file: &Path, within: Duration) {
        let named = format!("<{}>", file.display());
        until("a sync", within, || {
            assert!(self.tracer.alive(), "strace ended");
            let text = fs::read_to_string(&self.told).unwrap_or_default();
            let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
            for line in whole.lines().skip(self.read) {
                self.read += 1;
                let (thread, call) = line.trim_start().split_once(' ').expect("a thread and its call");
                let call = call.trim_start();
                let what = match call.strip_prefix("<... fdatasync resumed>") {
                    Some(_) => self.begun.remove(thread).unwrap_or_default(),
                    None => call.to_owned(),
                };
                if call.ends_with("<unfinished ...>") {
                    self.begun.insert(thread.to_owned(), what);
                } else if what.contains(&named) && call.contains(" = 0") {
                    return true;
                }
            }
            false
        });
    }
}
