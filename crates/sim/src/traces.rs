//! Traces in files: recording the sweep of a simulation, and playing a recorded trace, whether a simulation
//! or a server wrote it.

use crate::{BadCase, Case, Outcome, engine};
use fletch_core::order::{SweepPolicy, sweep::SweepParams};
use serde::Serialize;
use std::{fmt, fs::File, io::Write, path::Path};

/// Longest trace that can be played, in bytes. It is read into memory whole.
pub const TRACE_BYTES_MAX: u64 = 4 << 30;

/// A trace whose calls gave the same results again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MatchingTrace {
    /// Number of calls.
    pub calls: u64,
    /// Number of samples handed out.
    pub picks: u64,
    /// Whether the recording ended before its sweep did.
    pub cut: bool,
}

impl fmt::Display for MatchingTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cut = if self.cut { "; the recording was cut" } else { "" };
        write!(f, "{} calls, {} samples handed out: all results are the same{cut}", self.calls, self.picks)
    }
}

/// Plays a trace against this build's sweep.
///
/// # Errors
/// [`BadCase::Read`], [`BadCase::Long`], and [`BadCase::Trace`] when it is not a trace or a result differs.
pub fn play(path: &Path) -> Result<MatchingTrace, BadCase> {
    let unread = |why| BadCase::Read { path: path.to_owned(), why };
    let bytes = std::fs::metadata(path).map_err(unread)?.len();
    if bytes > TRACE_BYTES_MAX {
        return Err(BadCase::Long { path: path.to_owned(), bytes });
    }
    let trace = std::fs::read(path).map_err(unread)?;
    let played = SweepPolicy::play(&trace).map_err(|why| BadCase::Trace { path: path.to_owned(), why })?;
    Ok(MatchingTrace { calls: played.calls, picks: played.picks, cut: played.cut })
}

/// Simulates a case and writes the trace of its sweep.
///
/// # Errors
/// [`BadCase::Write`].
pub fn record(case: &Case, params: SweepParams, path: &Path) -> Result<Outcome, BadCase> {
    let unwritten = |why| BadCase::Write { path: path.to_owned(), why };
    let mut file = File::create(path).map_err(unwritten)?;
    let mut failed = None;
    let outcome = engine::record(case, params, &mut |piece| {
        if failed.is_none() {
            failed = file.write_all(&piece).err();
        }
    });
    failed.map_or(Ok(outcome), |why| Err(unwritten(why)))
}
