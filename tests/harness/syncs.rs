//! Holds the threads of a process at the end of each `fdatasync`.
//!
//! So a test can act between a durable write and the program's next step. strace delays the return of the
//! call and records it. While the thread is held, the kernel has completed the call and the program does not
//! know it yet.

use crate::{bins::Running, strace, watch::until};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

/// A process whose threads are held at the end of each `fdatasync`.
#[derive(Debug)]
pub struct Syncs {
    tracer: Running,
    /// The file to which strace writes.
    trace: PathBuf,
    /// The number of lines that were read.
    read: usize,
    /// The beginning of each thread's call, if strace wrote the call in two lines.
    begun: BTreeMap<String, String>,
}

impl Syncs {
    /// Starts to hold every thread of the process for `hold` at the end of each `fdatasync`.
    ///
    /// `trace` is a scratch file.
    ///
    /// # Panics
    /// If strace cannot attach.
    #[must_use]
    pub fn hold(pid: u32, trace: PathBuf, hold: Duration) -> Self {
        let inject = format!("inject=fdatasync:delay_exit={}", hold.as_micros());
        let tracer = strace::attach(&["-y", "-e", "trace=fdatasync", "-e", &inject], &trace, &[pid]);
        Syncs { tracer, trace, read: 0, begun: BTreeMap::new() }
    }

    /// Waits until the next sync of `file` has succeeded. The thread that called it is held from then on.
    ///
    /// # Panics
    /// If there is no sync in time.
    pub fn next(&mut self, file: &Path, within: Duration) {
        let named = format!("<{}>", file.display());
        until("a sync", within, || {
            assert!(self.tracer.alive(), "strace ended");
            let text = fs::read_to_string(&self.trace).unwrap_or_default();
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
