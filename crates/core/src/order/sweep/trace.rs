//! Traces of a sweep: recorded while it runs, and played again on the same code (`docs/FORMATS.md`, "Trace").
//!
//! A trace of a server that plays on another machine shows that both decide with the same code. It is a bug
//! report that can be run.
//!
//! I1. Playing a trace makes exactly the recorded calls, and the first answer that differs is an error.
//! I2. A trace log that reaches [`TRACE_LOG_BYTES_MAX`] before its bytes are taken ends with the mark of a
//!     cut trace; the sweep goes on.

use super::{
    SweepParams, SweepPolicy,
    trace_log::{CALLS, CUT, Call, CallResult, TraceLog, put_all},
};
use crate::{
    Kind,
    plan::{
        key::OrderKey,
        unit_map::{BadUnitMap, UnitMap},
    },
    record::{self, BadLog},
    varint::{get, get_list, put, put_list, take},
};
use std::sync::Arc;

pub use super::trace_log::TRACE_LOG_BYTES_MAX;

/// The format's major version.
pub const FORMAT_MAJOR: u64 = 4;
/// Values of the layout in one record.
const RECORD_VALUES_MAX: usize = 65_536;

const HEADER: u8 = 1;
const LENGTHS: u8 = 2;
const PLACES: u8 = 3;

/// Why a trace cannot be played.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadTrace {
    /// The log is foreign, newer or damaged.
    #[error(transparent)]
    Log(#[from] BadLog),
    /// The trace does not begin with a header and a layout.
    #[error("not a trace: it does not begin with a header and a layout")]
    Header,
    /// A Fletch with another trace format wrote the trace.
    #[error("trace format {0}: this build reads {FORMAT_MAJOR}; use the build that wrote it, or a newer one")]
    Major(u64),
    /// The trace's layout contradicts itself.
    #[error("the layout of the trace contradicts itself: {0}")]
    Layout(#[from] BadUnitMap),
    /// A call cannot be read, or cannot be made in the state that the calls before it left.
    #[error("call {0} of the trace is malformed")]
    Call(u64),
    /// This build decides otherwise than the build that wrote the trace.
    #[error(
        "call {call} of the trace now has another result: {recorded} in the trace, {played} in this build"
    )]
    Differs {
        /// The number of the call, from 1.
        call: u64,
        /// The result in the trace.
        recorded: String,
        /// The result in this build.
        played: String,
    },
}

impl BadTrace {
    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            BadTrace::Differs { .. } => Kind::Internal,
            _ => Kind::Corrupt,
        }
    }
}

/// A trace that was played to its end.
#[derive(Debug, Clone)]
pub struct PlayedTrace {
    /// Calls that were made.
    pub calls: u64,
    /// Calls that handed out a sample.
    pub picks: u64,
    /// Whether the recording was cut before its sweep ended.
    pub cut: bool,
    /// The sweep after the last call.
    pub sweep: SweepPolicy,
}

impl SweepPolicy {
    /// Returns the same sweep as [`SweepPolicy::new`], recorded from its beginning.
    /// [`SweepPolicy::take_trace`] returns the recording.
    #[must_use]
    pub fn recorded(unit_map: Arc<UnitMap>, capacity: u64, key: &OrderKey, params: SweepParams) -> Self {
        let mut out = record::file_header().to_vec();
        let mut head = Vec::new();
        put(&mut head, FORMAT_MAJOR);
        head.extend_from_slice(&key.0);
        put_all(&mut head, &[capacity, unit_map.units() as u64, unit_map.samples() as u64]);
        params.values().iter().for_each(|x| head.extend_from_slice(&x.to_le_bytes()));
        record::append(&mut out, HEADER, &head);
        let units: Vec<u32> = (0..unit_map.units()).map(|u| u32::try_from(u).unwrap_or(u32::MAX)).collect();
        let mut unit_of = vec![0; unit_map.samples()];
        for piece in units.chunks(RECORD_VALUES_MAX) {
            let mut p = Vec::new();
            for &u in piece {
                put(&mut p, unit_map.bytes(u));
                unit_map.samples_of(u).for_each(|s| unit_of[s as usize] = u);
            }
            record::append(&mut out, LENGTHS, &p);
        }
        for piece in unit_of.chunks(RECORD_VALUES_MAX) {
            let mut p = Vec::new();
            put_list(&mut p, piece);
            record::append(&mut out, PLACES, &p);
        }
        let mut policy = SweepPolicy::new(unit_map, capacity, key, params);
        policy.trace_log = Some(Box::new(TraceLog::new(out)));
        policy
    }

    /// Appends a call and its result to the trace log, if the sweep is recorded.
    pub(super) fn record(&mut self, call: impl FnOnce() -> Call, result: impl FnOnce() -> CallResult) {
        if let Some(trace_log) = &mut self.trace_log {
            trace_log.append(&self.unit_map, &call(), &result());
        }
    }

    /// Takes what was recorded since the last take. All takes, one after another, are the trace. Empty when
    /// the sweep is not recorded.
    #[must_use]
    pub fn take_trace(&mut self) -> Vec<u8> {
        self.trace_log.as_mut().map_or_else(Vec::new, |t| t.take())
    }

    /// Ends the recording and takes the rest of it, with the mark of a cut trace. Empty when the sweep is not
    /// recorded.
    #[must_use]
    pub fn cut_trace(&mut self) -> Vec<u8> {
        self.trace_log.take().map_or_else(Vec::new, |mut t| t.cut())
    }

    /// Makes the calls of a trace and compares each result. The trace ends where its last whole record ends.
    ///
    /// # Errors
    /// Any [`BadTrace`].
    pub fn play(trace: &[u8]) -> Result<PlayedTrace, BadTrace> {
        let (records, _) = record::read(trace)?;
        let mut records = records.into_iter().peekable();
        let head = records.next().filter(|r| r.kind == HEADER).ok_or(BadTrace::Header)?;
        let mut p = head.payload;
        let at = &mut p;
        match get(at) {
            Some(FORMAT_MAJOR) => {}
            Some(major) => return Err(BadTrace::Major(major)),
            None => return Err(BadTrace::Header),
        }
        let mut fields = || {
            let key = OrderKey(take(at, 32)?.try_into().ok()?);
            let (capacity, units, samples) = (get(at)?, get(at)?, get(at)?);
            let params = SweepParams::of_values(|| Some(f64::from_le_bytes(take(at, 8)?.try_into().ok()?)))?;
            Some((key, capacity, units, samples, params))
        };
        let (key, capacity, units, samples, params) = fields().ok_or(BadTrace::Header)?;
        let (mut bytes, mut unit_of) = (Vec::new(), Vec::new());
        while let Some(r) = records.next_if(|r| matches!(r.kind, LENGTHS | PLACES)) {
            let mut p = r.payload;
            if r.kind == PLACES {
                unit_of.extend(get_list(&mut p).ok_or(BadTrace::Header)?);
            } else {
                while !p.is_empty() {
                    bytes.push(get(&mut p).ok_or(BadTrace::Header)?);
                }
            }
        }
        if (bytes.len() as u64, unit_of.len() as u64) != (units, samples) {
            return Err(BadTrace::Header);
        }
        let unit_map = Arc::new(UnitMap::new(&unit_of, bytes)?);
        let sweep = SweepPolicy::new(unit_map, capacity, &key, params);
        let mut played = PlayedTrace { calls: 0, picks: 0, cut: false, sweep };
        for r in records {
            played.cut |= r.kind == CUT;
            let mut p = if r.kind == CALLS { r.payload } else { &[] };
            while !p.is_empty() {
                played.play_call(&mut p)?;
            }
        }
        Ok(played)
    }
}

impl PlayedTrace {
    /// Reads one call with its recorded result, makes it, and compares.
    fn play_call(&mut self, at: &mut &[u8]) -> Result<(), BadTrace> {
        self.calls += 1;
        let bad = BadTrace::Call(self.calls);
        let call = Call::read(at, &self.sweep).ok_or(bad.clone())?;
        let recorded = CallResult::read(at).ok_or(bad)?;
        let played = call.make(&mut self.sweep);
        self.picks += u64::from(played.pick.is_some());
        if played != recorded {
            let (recorded, played) = (format!("{recorded:?}"), format!("{played:?}"));
            return Err(BadTrace::Differs { call: self.calls, recorded, played });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
