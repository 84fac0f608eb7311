//! The end of a process whose mounts go on: its keeper has them for the next one.
//!
//! 1. A request that this process has not answered when it ends is sent again. So it must not answer one only
//!    because it ends: from [`leave`] on it sends no reply.
//! 2. A thread that puts pages into the page cache may wait for a page that a READ has locked. If the process
//!    ends then, it is dead and not gone until somebody answers that READ. So such work ends first, while
//!    READs are still answered.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

/// How long [`leave`] waits for pages that are being put into the page cache.
const PUSHES_END_WITHIN: Duration = Duration::from_secs(2);

static IS_PUSHING_OFF: AtomicBool = AtomicBool::new(false);
static IS_SILENT: AtomicBool = AtomicBool::new(false);
static PUSHES: AtomicUsize = AtomicUsize::new(0);

/// Pages that are being put into the page cache.
#[derive(Debug)]
pub struct Push(());

impl Push {
    /// Returns `None` if this process is about to leave.
    #[must_use]
    pub fn begin() -> Option<Self> {
        // Counted first: `leave` looks at the count after it forbids.
        PUSHES.fetch_add(1, SeqCst);
        let push = Push(());
        if IS_PUSHING_OFF.load(SeqCst) { None } else { Some(push) }
    }
}

impl Drop for Push {
    fn drop(&mut self) {
        PUSHES.fetch_sub(1, SeqCst);
    }
}

/// Whether this process sends no reply any more.
#[must_use]
pub fn is_silent() -> bool {
    IS_SILENT.load(SeqCst)
}

/// Lets what waits in the kernel end, and stops answering. Blocks for a moment.
pub fn leave() {
    IS_PUSHING_OFF.store(true, SeqCst);
    let until = Instant::now() + PUSHES_END_WITHIN;
    while PUSHES.load(SeqCst) > 0 && Instant::now() < until {
        thread::sleep(Duration::from_millis(1));
    }
    IS_SILENT.store(true, SeqCst);
}
