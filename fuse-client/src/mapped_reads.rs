//! READs for pages of mapped files. If such a READ fails, the kernel ends the program with SIGBUS. A read
//! call only gets an error. So a READ for a mapped page waits longer than others, while the server is away.
//!
//! The kernel's requests look the same for both. When a READ has failed, this module looks what its thread
//! does: a thread that waits in no system call waits for a page. Where the system hides that
//! (`ptrace_scope`), it counts as waiting for a page if its process has mapped the file.

use std::{
    fs,
    time::{Duration, Instant},
};
use tokio::{task::spawn_blocking, time::sleep};

/// How long to wait before the next attempt.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// How often the log says that a program waits.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// The wait of one READ.
#[derive(Debug)]
pub struct MappedRead {
    pid: u32,
    ino: u64,
    begun: Instant,
    logged: Option<Instant>,
}

impl MappedRead {
    /// Returns the wait of a READ of `ino` that a thread began at `begun`. The number of the thread is 0 if
    /// this process cannot see it.
    #[must_use]
    pub fn new(pid: u32, ino: u64, begun: Instant) -> Self {
        MappedRead { pid, ino, begun, logged: None }
    }

    /// Waits for a moment and returns true, if the READ is for a mapped page and began less than `within`
    /// ago.
    ///
    /// `why` says why the last attempt failed, for the log.
    pub async fn wait(&mut self, within: Duration, why: impl FnOnce() -> String) -> bool {
        let waited = self.begun.elapsed();
        if waited >= within || !self.is_for_a_page().await {
            return false;
        }
        if self.logged.is_none_or(|last| last.elapsed() >= LOG_EVERY) {
            self.logged = Some(Instant::now());
            tracing::warn!(
                pid = self.pid,
                waited_s = waited.as_secs(),
                within_s = within.as_secs(),
                "a program waits for a page of a file that it has mapped, and would end with SIGBUS: {}",
                why()
            );
        }
        sleep(AGAIN_AFTER.min(within - waited)).await;
        true
    }

    async fn is_for_a_page(&self) -> bool {
        let (pid, ino) = (self.pid, self.ino);
        // The kernel may let a reader of these files wait for the program's memory.
        spawn_blocking(move || waits_for_page(pid, ino)).await.unwrap_or(false)
    }
}

/// Returns whether a thread waits for a page of a mapped file with this inode, not for a system call.
fn waits_for_page(pid: u32, ino: u64) -> bool {
    if pid == 0 {
        return false;
    }
    match fs::read_to_string(format!("/proc/{pid}/syscall")) {
        // The number of the system call; -1 for a thread that waits in none.
        Ok(state) => state.starts_with("-1 "),
        Err(_) => fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| has_mapped(&maps, ino)),
    }
}

/// Returns whether `/proc/PID/maps` has a file with this inode on a file system without a disk.
fn has_mapped(maps: &str, ino: u64) -> bool {
    maps.lines().any(|line| {
        // address permissions offset device inode path
        let mut words = line.split_ascii_whitespace().skip(3);
        let (device, inode) = (words.next(), words.next());
        device.is_some_and(|device| device.starts_with("00:"))
            && inode.and_then(|inode| inode.parse().ok()) == Some(ino)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
        55d0c0a00000-55d0c0a02000 r--p 00000000 fe:00 1234   /usr/bin/cat\n\
        7f1200000000-7f1200021000 rw-p 00000000 00:00 0 \n\
        7f1210000000-7f1210100000 r--s 00000000 00:35 77     /mnt/data/with a space.bin\n";

    #[test]
    fn a_mapped_file_is_found_by_its_inode() {
        assert!(has_mapped(MAPS, 77));
        // A file of a disk with the same number is another file.
        assert!(!has_mapped(MAPS, 1234));
        assert!(!has_mapped(MAPS, 78));
        assert!(!has_mapped("nonsense\n\n", 77));
    }

    #[test]
    fn a_thread_in_a_system_call_waits_for_no_page() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            sender.send(nix::unistd::gettid()).expect("sent");
            std::thread::sleep(Duration::from_secs(2));
        });
        let tid = receiver.recv().expect("a thread").as_raw().cast_unsigned();
        std::thread::sleep(Duration::from_millis(200));
        assert!(!waits_for_page(tid, u64::MAX));
        assert!(!waits_for_page(0, 77) && !waits_for_page(u32::MAX, 77));
        waiting.join().expect("ended");
    }

    #[tokio::test]
    async fn a_read_that_nobody_sees_does_not_wait() {
        let mut wait = MappedRead::new(0, 7, Instant::now());
        assert!(!wait.wait(Duration::from_secs(60), String::new).await);
    }
}
