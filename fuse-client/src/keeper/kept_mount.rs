//! One mount that a keeper holds, and the state that it is in.
//!
//! | state | begins when | the keeper | a program that reads |
//! |---|---|---|---|
//! | served | a worker gets the device | does nothing | gets data |
//! | waiting | that worker ends, or says nothing | has requests sent again | gets cached data, or waits |
//! | failing | `--io-timeout` is over | answers EIO to all requests | gets cached data, or EIO |
//! | buried | `--hold-for` is over | has closed the device | gets ENOTCONN |
//!
//! ```text
//!           ended, silent           --io-timeout             --hold-for
//! served ──────────────────▶ waiting ──────────▶ failing ──────────────▶ buried
//!    ▲                         │ attach, speaks     │  ▲
//!    └─────────────────────────┴────────────────────┘  └── give_up: from served
//! ```
//!
//! From each state but the last, the mount ends when somebody unmounts it.
//!
//! 1. A mount that is not buried has its device, so it stays mounted: nobody sees an empty directory.
//! 2. A request that a worker read and did not answer is not lost. The kernel sends it again, at once: a
//!    program whose request a dead process has could not even be killed. A kernel that cannot do that has the
//!    request in the worker's memory ([`super::worker_memory`]), from where it gets into `unanswered`.

use super::watch::Watched;
use crate::fuse;
use crate::fuse_wire::{UNIQUE_AT, out_header, u32_at, u64_at};
use crate::handshake::Agreed;
use crate::session::BUFFER_BYTES;
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    unistd::{read, write},
};
use serde_json::Value;
use std::{
    collections::{BTreeMap, HashSet},
    fs, io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

/// How often requests that wait for a worker are sent again: one that is dead, and not gone, may have read
/// them.
const RESEND_EVERY: Duration = Duration::from_secs(1);
/// The most READs that are failed for one worker.
const RELEASED_MAX: usize = 4096;
const OPCODE_AT: usize = 4;
const INODE_AT: usize = 16;
/// The thread that waits; 0 if this process cannot see it.
const THREAD_AT: usize = 32;
const READ_OFFSET_AT: usize = 48;
const READ: u32 = 15;
/// The requests that have no reply: FORGET and BATCH_FORGET.
const WITHOUT_REPLY: [u32; 2] = [2, 42];

/// What happened to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerEvent {
    /// It says nothing.
    Silent,
    /// It was silent, and speaks.
    Speaks,
    /// It ended. One of its threads may still wait in the kernel, and may have read a request.
    Ended,
    /// Its last thread is gone.
    Gone,
}

#[derive(Debug)]
enum Phase {
    Served,
    Waiting { since: Instant, resent_at: Instant },
    Failing,
}

pub(super) struct KeptMount {
    pub device: Watched<OwnedFd>,
    pub agreed: Agreed,
    /// What a worker must know to answer as its predecessor.
    pub state: Value,
    phase: Phase,
    /// The socket of the worker that has the device, and did not end.
    pub worker: Option<u64>,
    /// The READs that were failed for a worker that is dead and not gone, by inode and offset.
    released: HashSet<(u64, u64)>,
    /// The requests that no worker answered and that the kernel does not send again, by their numbers.
    pub unanswered: BTreeMap<u64, Vec<u8>>,
}

impl KeptMount {
    /// A mount that a worker serves.
    pub fn new(device: Watched<OwnedFd>, agreed: Agreed, state: Value, worker: u64) -> Self {
        let (released, unanswered) = Default::default();
        KeptMount { device, agreed, state, phase: Phase::Served, worker: Some(worker), released, unanswered }
    }

    /// Gives a worker the device.
    pub fn attach(&mut self, worker: u64) -> io::Result<OwnedFd> {
        let device = self.device.descriptor.try_clone()?;
        self.resend();
        (self.phase, self.worker) = (Phase::Served, Some(worker));
        self.released.clear();
        Ok(device)
    }

    /// Something happened to a worker, which may have requests of this mount even if another one serves it.
    pub fn note(&mut self, worker: u64, event: WorkerEvent, now: Instant) {
        let serves = self.worker == Some(worker);
        if event != WorkerEvent::Speaks {
            self.resend();
        }
        match (event, &self.phase) {
            (WorkerEvent::Silent | WorkerEvent::Ended, Phase::Served) if serves => {
                self.phase = Phase::Waiting { since: now, resent_at: now };
            }
            (WorkerEvent::Speaks, _) if serves => self.phase = Phase::Served,
            _ => {}
        }
        self.worker = self.worker.filter(|_| !(serves && event == WorkerEvent::Ended));
    }

    /// A worker says that nobody will serve the mount.
    pub fn give_up(&mut self) {
        (self.phase, self.worker) = (Phase::Failing, None);
    }

    /// Does what is due now.
    pub fn tick(&mut self, now: Instant, io_timeout: Duration) -> io::Result<()> {
        match &mut self.phase {
            Phase::Waiting { since, .. } if now - *since >= io_timeout => self.phase = Phase::Failing,
            Phase::Waiting { resent_at, .. } if now - *resent_at >= RESEND_EVERY => {
                *resent_at = now;
                self.resend();
            }
            _ => {}
        }
        // The kernel gives up a request of a killed program by itself, unless a process has read it.
        for (unique, _) in self.unanswered.extract_if(.., |_, request| is_killed(u32_at(request, THREAD_AT)))
        {
            let _unheard = write(&self.device.descriptor, &out_header(unique, libc::EINTR, 0));
        }
        if matches!(self.phase, Phase::Failing) { self.fail_requests(|_| true) } else { Ok(()) }
    }

    /// Has the kernel send all unanswered requests again. It fails only if nothing is mounted any more, which
    /// the device tells, too.
    fn resend(&self) {
        if self.agreed.resend
            && let Err(error) = fuse::resend(&self.device.descriptor)
        {
            tracing::debug!(%error, "the kernel does not send requests again");
        }
    }

    /// Answers EIO to the first request for each page that a worker, which is dead and not gone, may wait
    /// for.
    ///
    /// Such a request comes from the kernel's read-ahead. When it fails, the page is unlocked, and the
    /// program that reads it asks once more. That second request waits for the next worker. Only a program
    /// that has mapped the file with `MADV_RANDOM` gets the error.
    pub fn release_pages(&mut self) -> io::Result<()> {
        let mut released = std::mem::take(&mut self.released);
        let failed = self.fail_requests(|request| {
            let page = (u64_at(request, INODE_AT), u64_at(request, READ_OFFSET_AT));
            let (Some(READ), (Some(inode), Some(offset))) = (u32_at(request, OPCODE_AT), page) else {
                return false;
            };
            released.len() < RELEASED_MAX && released.insert((inode, offset))
        });
        self.released = released;
        // What was read and not answered waits again.
        self.resend();
        failed
    }

    /// Reads all requests that wait, and answers EIO to those that `is_failed` returns true for. The kernel
    /// or the keeper has the others again.
    fn fail_requests(&mut self, mut is_failed: impl FnMut(&[u8]) -> bool) -> io::Result<()> {
        let mut waiting: Vec<Vec<u8>> = std::mem::take(&mut self.unanswered).into_values().collect();
        let device = &self.device.descriptor;
        let flags = OFlag::from_bits_retain(fcntl(device, FcntlArg::F_GETFL)?);
        fcntl(device, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match read(device, &mut buffer) {
                Ok(len) => waiting.push(buffer[..len].to_vec()),
                Err(Errno::ENOENT | Errno::EINTR) => {}
                // Nothing waits, or nothing is mounted.
                Err(_) => break,
            }
        }
        fcntl(device, FcntlArg::F_SETFL(flags))?;
        for request in waiting {
            let (Some(opcode), Some(unique)) = (u32_at(&request, OPCODE_AT), u64_at(&request, UNIQUE_AT))
            else {
                continue;
            };
            if WITHOUT_REPLY.contains(&opcode) {
                continue;
            }
            if is_failed(&request) {
                // Nobody waits for this reply any more if the kernel does not take it.
                let _unheard = write(device, &out_header(unique, libc::EIO, 0));
            } else if !self.agreed.resend {
                self.unanswered.insert(unique, request);
            }
        }
        Ok(())
    }
}

/// Whether SIGKILL waits for a thread to leave the kernel.
fn is_killed(thread: Option<u32>) -> bool {
    let status = thread.and_then(|thread| fs::read_to_string(format!("/proc/{thread}/status")).ok());
    let pending = status.as_ref().and_then(|status| status.lines().find_map(|l| l.strip_prefix("SigPnd:")));
    let pending = pending.and_then(|pending| u64::from_str_radix(pending.trim(), 16).ok());
    pending.is_some_and(|signals| signals >> (libc::SIGKILL - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_lives_or_cannot_be_seen_is_not_killed() {
        assert!(!is_killed(Some(std::process::id())));
        assert!(!is_killed(Some(0)) && !is_killed(None));
    }
}
