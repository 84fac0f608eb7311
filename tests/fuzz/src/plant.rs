//! Planted bugs: each target has one, which an armed process turns into a panic.
//!
//! A target plants its bug where only an input that passed the parser can reach it. A driver that finds the
//! planted bug is able to find a real one at that depth.

use std::sync::atomic::{AtomicBool, Ordering};

/// What the panic of a planted bug says.
pub const WORDS: &str = "the planted bug";

static ARMED: AtomicBool = AtomicBool::new(false);

/// Arms the planted bugs of this process.
pub fn arm() {
    ARMED.store(true, Ordering::Relaxed);
}

/// Panics if the planted bugs are armed and the input reached this one.
///
/// # Panics
/// See above.
pub fn bug(reached: bool) {
    assert!(!(reached && ARMED.load(Ordering::Relaxed)), "{WORDS}");
}
