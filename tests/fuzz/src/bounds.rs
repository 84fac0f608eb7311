//! The bounds that every target keeps: memory in bytes and processor time in seconds, for each input.

use crate::Target;
use cpu_time::ProcessTime;
use peak_alloc::PeakAlloc;
use std::time::Duration;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// The most processor time that one input may take.
const TIME_MAX: Duration = Duration::from_secs(1);

/// Runs a target on an input, within its bounds. Returns whether the parser accepted the input.
///
/// # Panics
/// When the parser breaks a promise, or the input takes more memory or time than the target allows. The
/// bounds count the whole process, so a process runs one target at a time.
pub fn check(target: &Target, input: &[u8]) -> bool {
    let held = ALLOCATED.current_usage();
    ALLOCATED.reset_peak_usage();
    let began = ProcessTime::now();
    let accepted = (target.run)(input);
    let took = began.elapsed();
    let peak = ALLOCATED.peak_usage().saturating_sub(held);
    let name = target.name;
    assert!(took < TIME_MAX, "{name}: an input of {} bytes took {took:?}", input.len());
    assert!(peak <= target.memory_max, "{name}: an input of {} bytes took {peak} bytes", input.len());
    accepted
}
